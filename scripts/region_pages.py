"""Pages of docs/algorithms: the list of all regions, and one page per region from its file in src/trustrl/regions.

python scripts/region_pages.py    writes them

DPPO, TROLL and PPO have pages that are written by hand. In a docstring, an indented block is an equation, and a word
with a colon alone on a line is a heading.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_tables
import latex

from trustrl.config.axes import Region, StalenessRegion
from trustrl.config.statistics import Statistic
from trustrl.regions import base, catalogue, classes, presets_of

FOLDER = Path(__file__).parents[1] / "docs/algorithms"
BY_HAND = ("dppo", "ppo", "troll")
NOTE = "<!-- Written by `python scripts/region_pages.py` from src/trustrl/regions/{}.py -->"
LEAVING = "`leaving`: outside its bound, and the update pushes it further out, as in [DPPO](dppo.md)."
READS = {
    "sampled": "the sampled token", "topk": "the top K ids", "exact": "the whole vocabulary",
    "projection": "the top K ids, with gradient,",
}  # fmt: skip
SHARED = {field.name for field in fields(base.AnchoredRegion)}

FIRST = "[First study](../results/first-study.md#other-regions-as-published), five seeds, sixteen updates on a rollout:"
SECOND = "[Second study](../results/second-study.md), 60 seeds, tuned, sixteen updates on a rollout:"
MEASURED = {
    "cispo": "[Second study](../results/second-study.md#is-it-the-weight), 40 seeds, tuned, with C = 2: ahead of no "
    "region; behind DPPO Top-K TV with the same cap in area, not in last accuracy.",
    "cppo": f"{FIRST} undecided against PPO.",
    "drpo": "[First study](../results/first-study.md), five seeds: a width of 0.05 against 12.5, and against PPO, is "
    "undecided.",
    "dis": "Not measured. [Signed against symmetric masks](../results/first-study.md) compares the directions for "
    "another statistic.",
    "gspo": f"{FIRST} undecided against PPO.",
    "ipo": "[Second study](../results/second-study.md#anchors-and-variants), 40 seeds, tuned: equal to Binary DPPO "
    "within 0.02. [First study](../results/first-study.md), five seeds: behind it in one setting of four.",
    "kpop": f"{FIRST} behind PPO.",
    "pg-is": f"{SECOND} behind PPO 0.8/1.12 and score centering; none of its runs ended below the start. "
    "[First study](../results/first-study.md): three of ten runs with sixteen updates on a rollout collapse.",
    "sapo": f"{FIRST} undecided against PPO.",
    "score-centering": f"{SECOND} with weights capped at 2 ahead of no region, equal to PPO 0.8/1.12 within 0.02 in "
    "area, below it at the end. "
    "[Its gradient](../results/score-centering.md): variance, and the bias that a tail leaves.",
    "spo": f"{FIRST} behind PPO.",
    "trm": f"{FIRST} undecided against PPO in final accuracy, behind it in reward over training. It dropped 74% of the "
    "tokens.",
}
"""Results by page. Rows are written here by hand."""


def name_of(module: ModuleType) -> str:
    """Returns the name of a region's page: its kind, or its file's name if the file has presets alone."""
    return next((region.kind for region in classes(module)), stem(module).replace("_", "-"))


def stem(module: ModuleType) -> str:
    """Returns the name of a region's file."""
    return module.__name__.rpartition(".")[2]


def short(value: Any) -> str:
    """Returns a settings object as it is written, without values that are defaults."""
    if not is_dataclass(value):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    parts = []
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        own = getattr(value, field.name)
        if isinstance(value, Statistic) and field.name in ("max_increase", "max_decrease"):
            default = value.max_increase if field.name == "max_decrease" else None
        if own != default:
            parts.append(f"{field.name}={short(own)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def documented(settings: type) -> dict[str, str]:
    """Returns the docstring of each field that a class defines, by name."""
    body = ast.parse(inspect.getsource(settings)).body[0].body
    texts = {}
    for field, following in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts


def row(*cells: str) -> str:
    """Returns one row of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def rows(settings: type, value: Any = None, prefix: str = "") -> Iterator[str]:
    """Yields one row for each setting that a class defines, and for each setting of a prefix budget in it."""
    for field in fields(settings):
        text = documented(settings).get(field.name)
        if text is None:
            continue
        default = "required" if value is None else f"`{short(getattr(value, field.name))}`"
        if value is None and field.default is not MISSING:
            default = f"`{short(field.default)}`"
        if value is None and field.default_factory is not MISSING:
            default = f"`{short(field.default_factory())}`"
        yield row(f"`{prefix}{field.name}`", default, text)
        if value is not None and type(getattr(value, field.name)).__name__ == "PrefixBudget":
            budget = getattr(value, field.name)
            yield from rows(type(budget), budget, f"{field.name}.")


def table(settings: type, value: Any = None) -> str:
    """Returns the table of a class's settings."""
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows(settings, value)])


def markdown(docstring: str, links: dict[str, str]) -> str:
    """Returns a docstring's text after its first line: equations as blocks, headings, and links to presets."""
    blocks = []
    for block in docstring.strip().split("\n\n")[1:]:
        if block.startswith("    "):
            blocks.append(latex.block(inspect.cleandoc(block)))
            continue
        text = re.sub(r"\n(?!- )\s*", " ", block)  # a wrapped line may start with a character that means something else
        text = re.sub(r"^([\w ]+):$", r"## \1", text)
        text = re.sub(r"^Reference: |^(?=There is no paper)", "## Reference\n\n", text)
        text = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
        blocks.append(re.sub(r"(?<!\[)`([a-z0-9-]+)`", lambda name: links.get(name[1], name[0]), text))
    return "\n\n".join(blocks)


def facts(preset: str, region: Region) -> dict[str, str]:
    """Returns the columns of a preset's row."""
    anchors = [mark for anchor, mark in engine_tables.ANCHORS.items() if anchor in region.needs().anchors]
    return {
        "preset": f"`{preset}`",
        "settings": f"`{short(region)}`",
        "effect": region.words(),
        "reads": f"log-probs of {READS[engine_tables.kind_of(region)]} under {' and '.join(anchors)}",
        "engines": engine_tables.listed(region),
    }


def page(module: ModuleType, links: dict[str, str]) -> str:
    """Returns the page of one region. Columns that all its presets share are lines above the table."""
    name, doc = name_of(module), inspect.getdoc(module) or ""
    presets = {preset: make() for preset, make in presets_of(module).items()}
    columns = [facts(preset, region) for preset, region in presets.items()]
    shared = {key: text for key, text in columns[0].items() if all(column[key] == text for column in columns)}
    other = {preset: link for preset, link in links.items() if preset not in presets}
    equation, _, rest = markdown(doc, other).partition("\n\n")
    prose, *sections = re.split(r"\n\n(?=## )", rest)
    limits = [section for section in sections if section.startswith("## Limits")]
    parts = [f"# {doc.partition(chr(10))[0].removesuffix('.')}", NOTE.format(stem(module))]
    if "`leaving`" in equation:
        prose = f"{LEAVING}\n\n{prose}"
    lines = [f"- **{key.capitalize()}**: {shared[key]}." for key in ("reads", "engines") if key in shared]
    if len(presets) == 1:
        use = '`trustrl.preset("{0}")`, or `{0}` in [your engine\'s line](../engines/index.md).'
        parts.append(shared["effect"])
        lines.insert(0, f"- **Use**: {use.format(*presets)}")
    lines.append(f"- **Results**: {MEASURED.get(name, 'not measured.')}")
    parts += [equation, prose, "\n".join(lines), *limits, "## Settings", settings_of(module, presets)]
    if len(presets) > 1:
        keys = [key for key in columns[0] if key not in shared]
        body = [row(*(column[key] for key in keys)) for column in columns]
        parts += ["## Presets", "\n".join([row(*keys), "|---" * len(keys) + "|", *body])]
    parts += [section for section in sections if section not in limits]
    return "\n\n".join(part for part in parts if part) + "\n"


def settings_of(module: ModuleType, presets: dict[str, Region]) -> str:
    """Returns the tables of settings: of the region's class, or of the corrections that its presets have."""
    first = next(iter(presets.values()))
    if own := classes(module):
        names = [field.name for field in fields(first) if field.name in SHARED - set(documented(own[0]))]
        others = f"[the shared ones](index.md#settings): {', '.join(f'`{name}`' for name in names)}."
        return f"{table(own[0], first)}\n\nAnd {others}" if documented(own[0]) else f"Only {others}"
    corrections = {type(region.correction) for region in presets.values() if region.correction is not None}
    if not corrections:
        return f"A point on the [axes](../concepts/divergences.md#axes): `{short(first)}`."
    by_name = {correction.__name__: correction for correction in corrections}
    return "\n\n".join(f"`{name}`:\n\n{table(by_name[name])}" for name in sorted(by_name))


def index() -> str:
    """Returns the list of all regions, with the rules and settings that they share."""
    lines = ["| region | presets | rule |", "|---|---|---|"]
    for module in ordered():
        title, _, rule = (inspect.getdoc(module) or "").partition("\n")[0].removesuffix(".").partition(": ")
        names = ", ".join(f"`{preset}`" for preset in presets_of(module))
        lines.append(row(f"[{title}]({name_of(module)}.md)", names, rule))
    rules = (inspect.getdoc(base) or "").partition("Every region:\n\n")[2]
    shared = table(base.AnchoredRegion).splitlines() + list(rows(StalenessRegion))
    return "\n\n".join(
        [
            "# Algorithms",
            NOTE.format("base"),
            "Each region decides for each token whether and how strongly an update may move it. [Choose "
            "one](../guides/choosing-a-region.md) by what you have; here are their rules.",
            "\n".join(lines),
            "In the equations π is the policy in training, b the anchor: μ, the sampler, or π', the trainer's policy "
            "before the first update ([four policies](../concepts/four-policies.md)). M = 0 masks a token, w is its "
            "weight, A its advantage, ℓ its loss, and sg stops the gradient. [Regions left out](../considered.md) are "
            "listed too.",
            "## Every region",
            rules,
            "## Settings",
            "\n".join(shared),
        ]
    ) + "\n"  # fmt: skip


def ordered() -> list[ModuleType]:
    """Returns the regions with presets: those with pages written by hand first, then by name."""
    modules = [module for module in catalogue() if presets_of(module)]
    return sorted(modules, key=lambda module: (stem(module) not in ("dppo", "troll", "ppo"), name_of(module)))


def pages() -> dict[str, str]:
    """Returns the text of each generated page by file name."""
    modules = ordered()
    links = {
        preset: f"[`{preset}`]({name_of(module)}.md)" for module in modules for preset in presets_of(module)
    }  # fmt: skip
    generated = {
        f"{name_of(module)}.md": page(module, links) for module in modules if stem(module) not in BY_HAND
    }  # fmt: skip
    return {"index.md": index(), **generated}


if __name__ == "__main__":
    for file, text in pages().items():
        (FOLDER / file).write_text(text)
