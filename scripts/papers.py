"""Table of docs/guides/papers.md: every experiment of both papers, its recipe, and its rehearsal.

python scripts/papers.py [RUN...]    merges rehearsals, from their run directories, into docs/data/rehearsals.json first

A rehearsal of a recipe that has changed since is not shown. Rows are written here by hand.
"""

import hashlib
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from trustrl.runner.recipe import load
from trustrl.runner.rehearsal import rehearsed

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/data/rehearsals.json", ROOT / "docs/guides/papers.md"
BEGIN, END = "<!-- begin experiments -->", "<!-- end experiments -->"
ENDING = "-rehearsal"

SAME, ARMS = "the same", "arms change the region alone"
EXPERIMENTS = (
    ("DPPO, MoE Base", "dppo-moe", "steps, data, layout and the average over tokens are not stated"),
    ("DPPO, MoE Base + R3", "dppo-moe-r3", SAME),
    ("DPPO, MoE Thinking", "dppo-moe-thinking", SAME),
    ("DPPO, dense 8B", "dppo-dense", "the same; the model is not stated, its size is"),
    ("DPPO, LoRA", "dppo-lora", SAME),
    ("DPPO, sanity test", "dppo-sanity", "the learning rate is not stated; [its problems](#the-sanity-tests-problems)"),
    ("DPPO, scaling runs' baselines", "arms/dppo-scaling.toml", ARMS),
    ("DPPO, figures 4 to 7", "arms/dppo-sanity.toml", f"{ARMS}; the α of figure 7's one-sided arms is ours"),
    ("DPPO in verl's repository", "dppo-moe-verl", "verl's `dppo_tv` is trustrl's Binary region"),
    ("TROLL × GRPO", "troll-grpo", "the benchmark of the evaluation is not stated"),
    ("TROLL × Dr. GRPO", "troll-dr-grpo", SAME),
    ("TROLL × GSPO", "troll-gspo", SAME),
    ("TROLL × PPO", "troll-ppo", SAME),
    ("TROLL on GSM8K", "troll-gsm8k", "-"),
    ("TROLL on Eurus", "troll-eurus", "Eurus code needs a sandbox, which trustrl does not have"),
    (
        "TROLL, other models", "`model.name=...` behind any of them",
        "give all of `[model]`: sizes for a plan, `architecture` for a rehearsal",
    ),
    ("TROLL, ablations and the clip", "arms/troll.toml", f"{ARMS}; the authors' clip of GSPO is not stated"),
)  # fmt: skip


def digest(plain: dict[str, Any]) -> str:
    """Returns a hash of a rehearsal's recipe, without the paths of its files."""
    kept = {name: table for name, table in plain.items() if name != "data"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def figures(run: Path) -> dict[str, Any]:
    """Returns what a rehearsal's run directory says about it."""
    recipe = load(run / "recipe.toml")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    result = json.loads((run / "result.json").read_text())
    strategy = recipe.layout.strategy or "fsdp2"
    return {
        "recipe": recipe.name.removesuffix(ENDING), "digest": digest(recipe.to_dict()),
        "engine": recipe.engine.name if recipe.engine.name == "trl" else f"{recipe.engine.ranks} × {strategy}",
        "architecture": recipe.model.name.removeprefix("stand-in-"), "sampler": recipe.sampler.kind,
        "updates": rows[-1]["step"], "reward": round(fmean(row["reward"] for row in rows), 3),
        "grad_norm": [round(row["grad_norm"], 4) for row in rows],
        "masked_share": [round(row.get("trustrl/masked_share") or 0.0, 4) for row in rows],
        "evaluation": evaluations[-1], "records": len(list((run / "records").rglob("*.parquet"))),
        "seconds": round(result["seconds"]),
    }  # fmt: skip


def table(rehearsals: dict[str, dict[str, Any]]) -> str:
    """Returns one line for each experiment."""
    lines = [
        "experiment | recipe | composed by verl | rehearsed | what differs or could not be said",
        " | ".join(["---"] * 5),
    ]
    for experiment, recipe, text in EXPERIMENTS:
        if recipe.endswith(".toml"):
            lines.append(
                f"{experiment} | arms in `recipes/{recipe}` | values compared | {_cell('', rehearsals)} | {text}"
            )
        else:
            name = recipe if recipe.startswith("`") else f"`{recipe}`"
            lines.append(
                f"{experiment} | {name} | {'-' if name == recipe else 'yes'} | {_cell(recipe, rehearsals)} | {text}"
            )
    return "\n".join(f"| {line} |" for line in lines)


def _cell(name: str, rehearsals: dict[str, dict[str, Any]]) -> str:
    row = rehearsals.get(name)
    if row is None:
        return "-"
    current = {digest(rehearsed(load(name), vllm=vllm)[0].to_dict()) for vllm in (True, False)}
    if row["digest"] not in current:
        return "not since its last change"
    return (
        f"{row['engine']}, {row['architecture']}, {row['sampler']}: {row['updates']} updates, reward {row['reward']}, "
        f"gradient {max(row['grad_norm'])}, {row['seconds']} s"
    )


def page(text: str, rehearsals: dict[str, dict[str, Any]]) -> str:
    """Returns the page with the table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(rehearsals)}\n{END}{rest.partition(END)[2]}"


def main(runs: list[str]) -> None:
    """Merges runs, and writes the table."""
    rehearsals = json.loads(DATA.read_text()) if DATA.exists() else {}
    for run in runs:
        row = figures(Path(run))
        rehearsals[row["recipe"]] = row
    if runs:
        DATA.write_text(json.dumps(dict(sorted(rehearsals.items())), indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), rehearsals))


if __name__ == "__main__":
    main(sys.argv[1:])
