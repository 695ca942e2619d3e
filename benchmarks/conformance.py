"""Results of `trustrl conformance` for the policy losses of several frameworks.

    python benchmarks/conformance.py measure    # tests the losses of every framework that can be imported
    python benchmarks/conformance.py page       # fills docs/conformance.md from docs/data/conformance.json

Measure each framework in a separate environment. A measurement replaces that framework's part of the data.
"""

import argparse
import json
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from evidence.pages import fill

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/data/conformance.json", ROOT / "docs/conformance.md"
VERL = "verl.trainer.ppo.core_algos:compute_policy_loss_"
SKYRL = "skyrl.backends.skyrl_train.utils.ppo_utils:"


class Subject(NamedTuple):
    """A loss, its intended kind, and settings if its defaults do not run."""

    loss: str
    kind: str
    settings: dict[str, Any] | None = None


SUBJECTS = {
    "trustrl": [
        Subject("trustrl:policy_loss", "dppo", {"region": "dppo-binary-tv"}),
        Subject("trustrl:policy_loss", "dppo", {"region": "dppo-binary-kl"}),
        Subject("trustrl:policy_loss", "ppo", {"region": "ppo"}),
        Subject("trustrl:policy_loss", "any", {"region": "gspo"}),
        Subject("trustrl:policy_loss", "any", {"region": "cispo"}),
        Subject("trustrl:policy_loss", "any", {"region": "sapo"}),
        Subject("trustrl:policy_loss", "pg", {"region": "pg-is"}),
    ],
    "verl": [
        Subject(f"{VERL}dppo_tv", "dppo"),
        Subject(f"{VERL}dppo_kl", "dppo"),
        Subject(f"{VERL}vanilla", "ppo"),
        Subject(f"{VERL}gspo", "any"),
        Subject(f"{VERL}cispo", "any"),
        Subject(f"{VERL}sapo", "any"),
        Subject(f"{VERL}geo_mean", "any"),
        Subject(f"{VERL}dro", "any", {"policy_loss": {"dro_beta": 0.1}}),
        Subject(f"{VERL}gpg", "pg"),
    ],
    "skyrl": [
        Subject(f"{SKYRL}dppo_policy_loss", "dppo"),
        Subject(f"{SKYRL}dppo_policy_loss", "dppo", {"dppo": {"dppo_type": "binary_kl"}}),
        Subject(f"{SKYRL}ppo_policy_loss", "ppo"),
        Subject(f"{SKYRL}ppo_policy_loss", "ppo", {"policy_loss_type": "dual_clip"}),
        Subject(f"{SKYRL}gspo_policy_loss", "any"),
        Subject(f"{SKYRL}compute_policy_loss_cispo", "any"),
        Subject(f"{SKYRL}sapo_policy_loss", "any"),
        Subject(f"{SKYRL}rollout_is_policy_loss", "any"),
        Subject(f"{SKYRL}importance_sampling_loss", "pg"),
    ],
}


def measure() -> None:
    from trustrl import __version__
    from trustrl.tools.conformance.adapters import adapted, find
    from trustrl.tools.conformance.corpus import counts, run, to_dict

    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    for package, subjects in SUBJECTS.items():
        if find_spec(package) is None:
            continue
        version = __version__ if package == "trustrl" else metadata.version(package)
        losses = []
        for subject in subjects:
            results = run(adapted(find(subject.loss), settings=subject.settings), subject.kind)
            kept = [
                {key: row[key] for key in ("verdict", "case", "expected", "got")}
                for row in to_dict(results)
                if row["verdict"] != "passes"
            ]
            losses.append(
                {**subject._asdict(), "settings": subject.settings or {}, "counts": counts(results), "results": kept}
            )
            print(package, version, subject.loss.partition(":")[2], subject.settings or "", counts(results), flush=True)
        data[package] = {"version": version, "torch": metadata.version("torch"), "losses": losses}
    DATA.write_text(json.dumps({name: data[name] for name in SUBJECTS if name in data}, indent=1, ensure_ascii=False))


def name_of(loss: dict[str, Any]) -> str:
    return loss["loss"].partition(":")[2] + (f" ({_flat(loss['settings'])})" if loss["settings"] else "")


def _flat(settings: dict[str, Any], at: str = "") -> str:
    parts = []
    for key, value in settings.items():
        parts.append(_flat(value, f"{at}{key}.") if isinstance(value, dict) else f"{at}{key}={value}")
    return ", ".join(parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def summary(data: dict[str, Any]) -> str:
    lines = ["| loss | judged as | passes | fails | differs |", "|---|---|---|---|---|"]
    for package, found in data.items():
        for loss in found["losses"]:
            numbers = " | ".join(str(loss["counts"].get(key, 0)) for key in ("passes", "fails", "differs"))
            lines.append(f"| {package} {found['version']} `{name_of(loss)}` | {loss['kind']} | {numbers} |")
    return "\n".join(lines)


def rows(data: dict[str, Any], verdict: str) -> str:
    """Returns a Markdown table with each case and, for each answer, the losses that gave it."""
    answers: dict[tuple[str, str, str], list[str]] = {}
    for package, found in data.items():
        for loss in found["losses"]:
            for row in loss["results"]:
                if row["verdict"] == verdict:
                    got = re.sub(r"^(used silently).*", r"\1", row["got"])  # its size depends on the scale of the batch
                    key = (row["case"], row["expected"], got)
                    answers.setdefault(key, []).append(f"{package} `{name_of(loss)}`")
    order = {row["case"]: None for found in data.values() for loss in found["losses"] for row in loss["results"]}
    lines = ["| case | expected | got | from |", "|---|---|---|---|"]
    for case in order:
        named = False
        for (name, expected, got), losses in answers.items():
            if name == case:
                head = " | " if named else f"{cell(case)} | {cell(expected)}"  # only in the first row of a case
                lines.append(f"| {head} | {cell(got)} | {', '.join(losses)} |")
                named = True
    return "\n".join(lines)


def bounds(data: dict[str, Any]) -> str:
    lines = [
        "| loss | rising, A > 0, masked at | falling, A < 0, masked at | weight of a rare token that rose, A < 0 |"
    ]
    lines.append("|---|---|---|---|")
    for package, found in data.items():
        for loss in found["losses"]:
            told = [cell(row["got"]) for row in loss["results"] if row["verdict"] == "tells"][-3:]
            lines.append(f"| {package} `{name_of(loss)}` | {' | '.join(told)} |")
    return "\n".join(lines)


def page() -> None:
    data = json.loads(DATA.read_text())
    fill(PAGE, "summary", summary(data))
    fill(PAGE, "fails", rows(data, "fails"))
    fill(PAGE, "differs", rows(data, "differs"))
    fill(PAGE, "bounds", bounds(data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "page"))
    {"measure": measure, "page": page}[parser.parse_args().what]()
