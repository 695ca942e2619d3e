"""Results of `trustrl conformance` for the policy losses of several frameworks.

    python studies/11-losses-conform/conformance.py measure  # tests the losses of every framework that can be imported
    python studies/11-losses-conform/conformance.py page     # fills the pages from docs/data/conformance.json
    python studies/11-losses-conform/conformance.py matrix .nox/trl/bin/python .nox/verl/bin/python=build/openrlhf ...

`matrix` measures with each of these interpreters, one after the other, and then fills the page. Folders after `=` are
added to PYTHONPATH; `pip install --no-deps --target FOLDER PACKAGE` makes one. A measurement replaces the frameworks
that it can import and leaves the rest of the data.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from pages import fill

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs/data/conformance.json"
PAGE, TABLES = ROOT / "docs/results/losses.md", ROOT / "docs/results/losses-tables.md"
VERL = "verl.trainer.ppo.core_algos:compute_policy_loss_"
TRL = "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
OPENRLHF = "openrlhf.models.loss:PolicyLoss"
AREAL = "areal.utils.functional.functional:"
RLINF = "rlinf.algorithms.losses:"
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
    "trl": [
        Subject(TRL, "ppo", {"loss_type": "dapo"}),
        Subject(TRL, "ppo", {"loss_type": "grpo"}),
        Subject(TRL, "ppo", {"loss_type": "bnpo"}),
        Subject(TRL, "ppo", {"loss_type": "dr_grpo"}),
        Subject(TRL, "any", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        Subject(TRL, "any", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
        Subject(TRL, "any", {"loss_type": "cispo", "epsilon_high": 5.0}),
        Subject(TRL, "any", {"loss_type": "sapo"}),
        Subject(TRL, "any", {"loss_type": "vespo"}),
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
        Subject(f"{VERL}kl_cov", "any"),
        Subject(f"{VERL}clip_cov", "any"),
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
    "openrlhf": [
        Subject(OPENRLHF, "ppo"),
        Subject(OPENRLHF, "ppo", {"dual_clip": 3.0}),
        Subject(OPENRLHF, "any", {"policy_loss_type": "gspo"}),
    ],
    "areal": [
        Subject(f"{AREAL}ppo_actor_loss_fn", "ppo", {"eps_clip": 0.2}),
        Subject(f"{AREAL}ppo_actor_loss_fn", "any", {"eps_clip": 0.2, "importance_sampling_level": "sequence"}),
        Subject(f"{AREAL}sapo_loss_fn", "any", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ],
    "rlinf": [
        Subject(f"{RLINF}compute_ppo_actor_loss", "ppo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
        Subject(f"{RLINF}compute_decoupled_ppo_actor_loss", "ppo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
    ],
    "torchtune": [Subject("torchtune.rlhf.loss.ppo:PPOLoss", "ppo")],
}
BARE = {
    "openrlhf": ("openrlhf", "openrlhf.models"),
    "torchtune": ("torchtune",),
}
"""Packages whose `__init__` imports more than the loss needs, such as flash_attn. It is not run."""


def bare(*packages: str) -> None:
    """Registers packages without running their `__init__`, so that one of their modules can be imported alone."""
    for name in packages:
        spec = find_spec(name)
        assert spec is not None
        module = ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations or [])
        sys.modules[name] = module


def measure() -> None:
    from trustrl import __version__
    from trustrl.errors import ConfigError

    for package, subjects in SUBJECTS.items():
        if find_spec(package) is None:
            continue
        bare(*BARE.get(package, ()))
        version = __version__ if package == "trustrl" else metadata.version(package)
        try:
            losses = [measured(subject) for subject in subjects]
        except ConfigError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            print(f"{package} {version} is left out: {error.__cause__}.", file=sys.stderr)
            continue
        for loss in losses:
            print(package, version, name_of(loss), loss["counts"], flush=True)
        data = json.loads(DATA.read_text())
        data[package] = {"version": version, "torch": metadata.version("torch"), "losses": losses}
        ordered = {name: data[name] for name in SUBJECTS if name in data}
        DATA.write_text(json.dumps(ordered, indent=1, ensure_ascii=False))


def measured(subject: Subject) -> dict[str, Any]:
    """Returns the counts of one loss by group, and every case that does not pass."""
    import torch

    from trustrl.tools.conformance.adapters import adapted, find
    from trustrl.tools.conformance.corpus import GROUPS, counts, run, to_dict

    torch.manual_seed(0)  # verl's clip_cov draws tokens at random
    results = run(adapted(find(subject.loss), settings=subject.settings), subject.kind)
    kept = [
        {key: row[key] for key in ("verdict", "group", "case", "expected", "got")}
        for row in to_dict(results)
        if row["verdict"] != "passes"
    ]
    by_group = {group: counts([row for row in results if row.group == group]) for group in GROUPS}
    return {
        **subject._asdict(), "settings": subject.settings or {}, "counts": counts(results), "groups": by_group,
        "results": kept,
    }  # fmt: skip


def matrix(environments: list[str]) -> None:
    """Measures in each environment, then fills the page."""
    for one in environments:
        python, _, folders = one.partition("=")
        paths = [*filter(None, folders.split(":")), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(str(Path(folder).resolve()) for folder in paths if folder)
        command = [python, __file__, "measure"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    page()


def name_of(loss: dict[str, Any]) -> str:
    return loss["loss"].partition(":")[2] + (f" ({_flat(loss['settings'])})" if loss["settings"] else "")


def _flat(settings: dict[str, Any], at: str = "") -> str:
    parts = []
    for key, value in settings.items():
        parts.append(_flat(value, f"{at}{key}.") if isinstance(value, dict) else f"{at}{key}={value}")
    return ", ".join(parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(data: dict[str, Any]) -> str:
    """Returns the matrix: a row for each loss, a column for each group of the corpus."""
    groups = ("truth tables", "invariants", "bounds", "faults")
    lines = [f"| engine | loss | judged as | {' | '.join(groups)} |", "|---|---|---|" + "---|" * len(groups)]
    for package, found in data.items():
        for loss in found["losses"]:
            cells = " | ".join(outcome(loss["groups"][group]) for group in groups)
            lines.append(f"| {package} {found['version']} | `{name_of(loss)}` | {loss['kind']} | {cells} |")
    return "\n".join(lines)


def summary(data: dict[str, Any]) -> str:
    """Returns a row for each engine: its losses, and the cases that pass, fail and differ over all of them."""
    lines = ["| engine | losses | cases that pass | fail | differ |", "|---|---|---|---|---|"]
    for package, found in data.items():
        counts = [sum(loss["counts"].get(key, 0) for loss in found["losses"]) for key in ("passes", "fails", "differs")]
        passes, fails, differs = counts
        version, losses = found["version"], len(found["losses"])
        lines.append(f"| {package} {version} | {losses} | {passes} of {sum(counts)} | {fails} | {differs} |")
    return "\n".join(lines)


def outcome(counts: dict[str, int]) -> str:
    """Returns one cell: the cases that pass of those judged, and links to the others."""
    passes, fails, differs = (counts.get(key, 0) for key in ("passes", "fails", "differs"))
    judged = passes + fails + differs
    if not judged:
        return "–"
    parts = [f"{passes} of {judged}"]
    if fails:
        parts.append(f"[{fails} fail](#what-fails)")
    if differs:
        parts.append(f"[{differs} differ](#what-differs)")
    return ", ".join(parts)


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
    fill(TABLES, "matrix", table(data))
    fill(TABLES, "fails", rows(data, "fails"))
    fill(TABLES, "differs", rows(data, "differs"))
    fill(TABLES, "bounds", bounds(data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "page", "matrix"))
    parser.add_argument("environments", nargs="*", metavar="PYTHON[=FOLDER:...]", help="interpreters for `matrix`")
    options = parser.parse_args()
    if options.what == "matrix":
        matrix(options.environments)
    else:
        {"measure": measure, "page": page}[options.what]()
