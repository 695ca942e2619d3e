"""Page of the sampler contract: fields of the record, results of the contract suite, and cost.

python scripts/sampler_contract.py                 writes docs/reference/sampler-contract.md
python scripts/sampler_contract.py RESULTS.json... first adds results of `support.contract.run` to docs/data
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.common.sampler_fields import KEPT, KEPT_COUNTS, KEPT_IDS, MAX_KEPT, TOPK, TOPK_IDS, TOPK_LOGP

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs/data/sampler-contract.json"
PAGE = ROOT / "docs/reference/sampler-contract.md"
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}

MEANING = " ".join(str(SampledRecord.__doc__).partition("\n\n")[2].split())
MEANING += (
    " T is the number of tokens, K that of most probable ids, n that of the kept ids of all tokens, and E is layers "
)
MEANING += "× experts per token."

PROSE = f"""\
# Sampler contract

<!-- Written by `python scripts/sampler_contract.py` -->

Use this page to find out what a sampler's record means, what each sampler can record, and what it costs.

A trainer says what its region reads as `Wanted` (K most probable ids, at most so many kept ids, routed experts). The
sampler's `SamplerAdapter` turns this into the sampler's own request, and the answer into a `SampledRecord`. It refuses
what it cannot record. Adapters choose a request's fields by their names, not by the sampler's
version.

Between processes, `sampling_params["extra_args"]` carries the request: `{TOPK}` is K, and `{KEPT}` the largest
number of kept ids ({MAX_KEPT:,} by default). Answers carry the columns as `{TOPK_IDS}`, `{TOPK_LOGP}`,
`{KEPT_IDS}` and `{KEPT_COUNTS}`.

## Fields

{fill(MEANING, 120)}

"""

RESULTS = """
## Results

Each row runs on the real engine, with a model of 100,000 float32 parameters on a CPU. A figure is the largest
difference in nats between the record and a float32 forward pass by transformers; 1e-4 is allowed. The two faults
must be caught before the first step.

"""


COST = """
## Cost

Microseconds of CPU time per token in all processes of the sampler, its forward pass included: 64 requests at once, one
layer of 128 features, a vocabulary of 49,152, medians of three alternating rounds on a machine that other work kept
busy (`python benchmarks/sampler_cost.py engine`). Compare the three figures of a row: rows and samplers ran at other
times. Own records are the sampler's lists of log-probs; for truncated sampling they have the 512 ids that top-k
leaves, and SGLang's are of the whole vocabulary. Bytes are those of trustrl's record, measured when each kept id
took 4; below 65,536 it takes 2 now. vLLM applies top-k before top-p, and SGLang both to the whole vocabulary, so it
keeps more ids. SGLang ran with its default `sampling_mask_max_tokens` of 4,096. In its row for K = 64 own records took
less time than none: differences of a fifth say nothing.

"""

PARTS = """
A record's part in the frontend. The sampler slices the rows of every request itself and calls trustrl once for each, so
a copy once per step for the whole batch is out of reach: rows are copied in blocks of 64 steps instead.

"""


def fields() -> str:
    """Returns the table of the record's fields."""
    lines = ["| field | shape | meaning | filled by | bytes per token |", "|---|---|---|---|---|"]
    for name, column in SampledRecord.fields().items():
        lines.append(f"| `{name}` | {column.shape} | {column.meaning} | {column.filled_by} | {column.size} |")
    return "\n".join(lines) + "\n"


def results(samplers: Mapping[str, Any]) -> str:
    """Returns the table of results, and the notes of its cells."""
    names = list(dict.fromkeys(name for sampler in samplers.values() for name in sampler["rows"]))
    lines = [f"| row | {' | '.join(samplers)} |", "|---|" + "---|" * len(samplers)]
    notes: list[str] = []
    for name in names:
        cells = [_cell(sampler["rows"].get(name), notes) for sampler in samplers.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]) + "\n"


def _cell(row: Mapping[str, Any] | None, notes: list[str]) -> str:
    if row is None:
        return "not run"
    note = ""
    if row["note"]:
        sentence = row["note"].removesuffix(".") + "."
        if sentence not in notes:
            notes.append(sentence)
        note = f" ({notes.index(sentence) + 1})"
    if row["result"] == "cannot":
        return f"cannot{note}"
    if row["unit"] == "nats":
        return f"{row['result']}, {row['figure']:.0e}{note}".replace("e-0", "e-")
    return f"{row['result']}, {row['figure']:.2g} {row['unit']}{note}"


def cost(samplers: Mapping[str, Any]) -> str:
    """Returns the tables of CPU time and bytes per token."""
    lines = ["| sampler | record | no log-probs | own records | trustrl | bytes |", "|---|---|---|---|---|---|"]
    parts = ["| sampler | record | the sampler's own slice | copy | read |", "|---|---|---|---|---|"]
    for title, costs in samplers.items():
        for name, case in costs["cases"].items():
            spent = " | ".join(f"{value:,.0f}" for value in case["microseconds"].values())
            kept = f" ({case['kept']} kept ids)" if "kept" in case else ""
            lines.append(f"| {title} | {name} | {spent} | {case['bytes']:,}{kept} |")
        for name, part in costs.get("frontend", {}).items():
            parts.append(f"| {title} | {name} | {' | '.join(f'{value:.2f}' for value in part.values())} |")
    return "\n".join(lines) + "\n" + PARTS + "\n".join(parts) + "\n"


def page(data: Mapping[str, Any]) -> str:
    """Returns the text of the page."""
    measured = f"{COST}{cost(data['cost'])}" if data.get("cost") else ""
    return f"{PROSE}{fields()}{RESULTS}{results(data['results'])}{measured}"


def merged(data: dict[str, Any], files: list[Path]) -> dict[str, Any]:
    """Returns the data with the results of these files, which replace those of the same sampler and row."""
    parts = [json.loads(file.read_text()) for file in files]
    for part in [part for part in parts if "cost" in part]:
        data.setdefault("cost", {})[f"{NAMES[part['sampler']]} {part['version']}"] = part["cost"]
        parts.remove(part)
    versions = {part["sampler"]: part["version"] for part in parts if part.get("version")}
    for part in sorted(parts, key=lambda part: -len(part["rows"])):
        title = f"{NAMES[part['sampler']]} {part.get('version') or versions[part['sampler']]}"
        rows = data["results"].setdefault(title, {"rows": {}})["rows"]
        rows |= {row["row"]: {key: value for key, value in row.items() if key != "row"} for row in part["rows"]}
    return data


def main(files: list[Path]) -> None:
    """Writes data and page."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {"results": {}}
    if files:
        DATA.write_text(json.dumps(merged(data, files), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(data))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
