"""Run folders made by hand, with metrics, evaluations and records as runs leave them; no engine and no torch."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

from support.recipes import small
from trustrl.recording.checksums import seal
from trustrl.recording.schema import COLUMNS, REGION_KEY, VERSION, VERSION_KEY, arrow_schema
from trustrl.recording.sequence_tables import write_sequences
from trustrl.regions.loading import config_to_dict
from trustrl.regions.presets import preset

HOSTILE = {
    0: "</script><img src=x onerror=document.title='owned'>",
    1: "\u202ereversed\u202c",
    2: "\x00\x1b[2J\x07",
    3: "\ud800",
    4: "x" * 100_000,
    5: "<!--<script>",
    6: "\u2028\u2029&lt;",
    7: "a" + "\u0301" * 50,
    8: "\n",
    9: "' onmouseover='document.title=1' \"",
}
"""Token texts that try to be something else."""


def steps(count, every=1, **more):
    """Metrics of a run whose reward rises."""
    return [
        {
            "step": step, "reward": step / count, "loss": 0.1, "grad_norm": 0.5, "trustrl/masked_share": 0.01,
            "trustrl/divergence_mean": 0.02, "trustrl/divergence_p99": 0.2, "trustrl/kl_k3": 0.001,
            "trustrl/entropy": 1.0 - step / (2 * count), "trustrl/mismatch_abs_mean": 1e-5, **more,
        }
        for step in range(every, count + 1, every)
    ]  # fmt: skip


def run_folder(
    path,
    *,
    name="small",
    region="dppo-binary-tv",
    rows=None,
    evaluations=((0, 0.25), (8, 0.75)),
    finished=True,
    updates=1,
):
    """A run's folder; `rows` as in metrics.jsonl."""
    path.mkdir(parents=True)
    schedule = (f"schedule.steps={8 * updates}", f"schedule.updates_per_batch={updates}")
    text = replace(small(f"region.preset={region}", *schedule), name="small").to_toml()
    assert text.count('name = "small"') == 1
    # Some tests use names that a recipe refuses, because a folder from another program may have them.
    text = text.replace('name = "small"', f"name = {json.dumps(name)}")
    (path / "recipe.toml").write_text(text, encoding="utf-8")
    lines = [json.dumps(row) + "\n" for row in (steps(8) if rows is None else rows)]
    (path / "metrics.jsonl").write_text("".join(lines))
    if evaluations:
        lines = [json.dumps({"step": step, "accuracy": share, "count": 500}) + "\n" for step, share in evaluations]
        (path / "evaluation.jsonl").write_text("".join(lines))
    if finished:
        (path / "result.json").write_text(json.dumps({"name": name, "seconds": 12.5}))
    return path


def write_records(folder, columns, *, step=0, rank=0, region="dppo-binary-tv"):
    """One file of records; columns that are not given are as dull as can be. Without a region, nothing is decided."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    count = len(next(iter(columns.values())))
    dull = {
        "step": step, "update": 0, "rank": rank, "sequence": 1, "advantage": 1.0, "behavior_logp": -1.0,
        "policy_logp": -1.0, "weight": 1.0, "kept": True, "token_id": 0,
    }  # fmt: skip
    settings = None if region is None else config_to_dict(preset(region))
    if region is None:
        dull |= {"weight": None, "kept": None}
    schema = arrow_schema({VERSION_KEY: str(VERSION).encode(), REGION_KEY: json.dumps(settings).encode()})
    filled = {
        column.name: columns.get(column.name, [dull.get(column.name)] * count) for column in COLUMNS if column.name != "position"
    } | {"position": columns.get("position", list(range(count)))}  # fmt: skip
    table = pa.table([pa.array(filled[field.name], field.type) for field in schema], schema=schema)
    file = folder / f"step-{step:08d}.rank-{rank:04d}.parquet"
    pq.write_table(table, file)
    sealed(file)


def sealed(file):
    """Adds checksums to a Parquet file, as the writer of records does."""
    with file.open("r+b") as opened:
        seal(opened)


def write_groups(folder, groups, *, step=0, region="dppo-binary-tv", tokens=6):
    """Records of groups of completions, as the recorder writes them: tokens, sequences and texts.

    `groups` maps a prompt to its rewards. The tokens of a completion have ids from 0 and fall by a tenth of a nat more
    with each completion; the first completion of a group has its first token masked.
    """
    rows, columns = (
        [],
        {name: [] for name in ("sequence", "position", "token_id", "policy_logp", "proximal_logp", "kept")},
    )
    for group, (prompt, rewards) in enumerate(groups.items()):
        for at, reward in enumerate(rewards):
            sequence = 100 * group + at
            rows.append(
                {
                    "sequence": sequence, "group": group, "task_id": "sums", "completion_tokens": tokens, "reward": reward,
                    "rewards": {"correct": reward, "format": 1.0}, "advantage": reward - 0.5, "prompt": prompt,
                    "stop_reason": "length" if at == len(rewards) - 1 else "stop", "completion": f"answer {sequence}",
                }
            )  # fmt: skip
            for place in range(tokens):
                values = (sequence, place, place, -1.0 - at / 10, -1.0 + group / 100, bool(at or place))
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    if region is None:
        del columns["kept"]
    write_records(folder, columns, step=step, region=region)
    write_sequences(folder, rows, step=step, rank=0, text=True)
    return folder


def hostile_tokenizer(monkeypatch, folder):
    """A tokenizer, found on this machine, whose tokens are `HOSTILE`."""

    class Tokenizer:
        @classmethod
        def from_pretrained(cls, path, **settings):
            assert path == str(folder)
            assert settings == {"local_files_only": True, "trust_remote_code": False}
            return cls()

        def __len__(self):
            return len(HOSTILE)

        def decode(self, ids, **settings):
            return HOSTILE[ids[0]]

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=Tokenizer))
    monkeypatch.setattr("trustrl.world.models.local", lambda name: str(folder))
