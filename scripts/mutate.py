"""Mutation testing on a seeded sample: changes the code in one small place and checks that a test fails.

    nox -s mutation                 # 450 mutants, seed 0, under ten minutes on two cores
    nox -s mutation -- --sample 50
    nox -s mutation -- --match gmpo # all mutants of the functions whose name contains it
    nox -s mutation -- --again      # only those that survived the last run, after a change to the tests

mutmut makes and runs the mutants (settings in pyproject.toml); this file draws the sample and writes the summary to
docs/data/mutation.json. docs/mutation.md explains the survivors.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUMMARY = ROOT / "docs/data/mutation.json"
WORDS = "ǁwords__"
"""Part of the names of mutants in a region's sentence for reports, which decides nothing. They are left out."""


def mutmut(*args: str, capture: bool = False) -> str:
    """Runs mutmut in the project's root, with few examples per property and one thread per process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRUSTRL_CASES": "100"}
    command = [sys.executable, "-m", "mutmut", *args]
    done = subprocess.run(
        command, cwd=ROOT, env=env, check=False, text=True, stdout=subprocess.PIPE if capture else None
    )
    return done.stdout or ""


def verdicts() -> dict[str, str]:
    """Returns the verdict so far of every mutant, by name."""
    lines = mutmut("results", "--all", "true", capture=True).splitlines()
    return dict(line.strip().split(": ", 1) for line in lines if "__mutmut_" in line)


def main() -> int:
    """Draws the sample, runs it, writes the summary.

    Returns:
        0 if at least nine mutants in ten were killed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=450, help="Number of mutants (default 450).")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sample (default 0).")
    parser.add_argument("--again", action="store_true", help="Run the survivors of the last run again.")
    parser.add_argument("--match", help="Run all mutants whose name matches this pattern. Writes no summary.")
    args = parser.parse_args()

    start = time.monotonic()
    known = {name: verdict for name, verdict in verdicts().items() if verdict != "not checked"} if args.again else {}
    if args.again and not known:
        parser.error("--again needs the verdicts of a run before. Run without it first.")
    print("making mutants and measuring which tests reach them ...", file=sys.stderr)
    mutmut("run", "trustrl.core.numerics.x_free_to_look__mutmut_1")
    everything = sorted(name for name in verdicts() if WORDS not in name)
    sample = random.Random(args.seed).sample(everything, min(args.sample, len(everything)))
    if args.match:
        sample = [name for name in everything if re.search(args.match, name)]
    chosen = sorted(known if args.again else sample)
    to_run = {name for name in chosen if known.get(name) not in ("killed", "timeout")}
    print(f"running {len(to_run)} of {len(everything)} mutants ...", file=sys.stderr)
    mutmut("run", "--max-children", "2", *sorted(to_run))

    now = verdicts()
    found = {name: now[name] if name in to_run else known[name] for name in chosen}
    counts = Counter(found.values())
    # A mutant that hangs is noticed as surely as one that fails.
    killed = counts["killed"] + counts["timeout"]
    summary = {
        "mutants": len(everything),
        "sample": len(chosen),
        "seed": args.seed,
        "verdicts": dict(sorted(counts.items())),
        "killed_share": round(killed / len(chosen), 4),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "not_killed": sorted(name for name, verdict in found.items() if verdict not in ("killed", "timeout")),
    }
    if not args.match:
        SUMMARY.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    return 0 if killed >= 0.9 * len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
