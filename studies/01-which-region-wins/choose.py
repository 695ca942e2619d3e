"""Choice of thresholds for the comparison: for each arm, the one of three with the highest mean tuning accuracy.

    trustrl compare recipes/evidence/stale.toml schedule.seed=100 --arms recipes/evidence/tuning.toml --seeds 2 --out T
    python studies/01-which-region-wins/choose.py T

Writes docs/results/data/tuning.json and recipes/evidence/arms.toml. The latter holds the chosen arms under their plain
names, pg-is, which has no threshold, and the variants that single questions need.
"""

import json
import sys
import tomllib
from pathlib import Path

from trustrl.runner import recipe_files

ROOT = Path(__file__).parents[2]
TUNING, ARMS = (ROOT / "recipes/evidence" / name for name in ("tuning.toml", "arms.toml"))
FOUND = ROOT / "docs/results/data/tuning.json"
NOTE = "# Made by studies/01-which-region-wins/choose.py: thresholds as tuned, then the variants of single questions.\n"


def choose(table: dict) -> tuple[dict, dict]:
    """Returns the accuracy of each value, and the arms with the best values."""
    regions = tomllib.loads(TUNING.read_text())
    tried: dict[str, dict[str, dict]] = {}
    for name, row in table["regions"].items():
        arm, value = name.rsplit("-", 1)
        if row["finished"] != row["runs"]:
            raise SystemExit(f"{name} has {row['finished']} of {row['runs']} runs. Rerun the tuning to resume it.")
        after = [run["result"]["accuracy_after"] for run in table["runs"] if run["region"] == name]
        tried.setdefault(arm, {})[value] = {
            "region": regions[name],
            "before": row["accuracy_before"]["mean"],
            "after": after,
            "mean": sum(after) / len(after),
        }
    best = {arm: max(values, key=lambda value: values[value]["mean"]) for arm, values in tried.items()}
    arms = {"pg-is": {"preset": "pg-is"}, **{arm: tried[arm][value]["region"] for arm, value in best.items()}}
    arms["dppo-binary-tv-proximal"] = {**arms["dppo-binary-tv"], "anchor": "proximal"}
    arms["troll-behavior"] = {**arms["troll"], "anchor": "behavior"}
    arms["drpo-12.5"] = {"preset": "drpo", "width": 12.5}
    return {"tried": tried, "best": best}, arms


def main() -> None:
    found, arms = choose(json.loads(Path(sys.argv[1], "table.json").read_text()))
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    ARMS.write_text(NOTE + "\n" + recipe_files.dumps(arms))
    for arm, value in found["best"].items():
        means = ", ".join(f"{name} {one['mean']:.3f}" for name, one in found["tried"][arm].items())
        print(f"{arm}: {value} ({means})", file=sys.stderr)


if __name__ == "__main__":
    main()
