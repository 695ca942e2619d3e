"""`trustrl records check`: every rule of the specification is broken once, and named."""

import json
import shutil

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from support import recording_batches as batches
from support.run_folders import sealed
from trustrl.cli import main
from trustrl.recording import QuantileAbove, Recorder, Recording, record_check, value_checks
from trustrl.recording.schema import STEP_KEY, VERSION, VERSION_KEY
from trustrl.regions.presets import preset

REGION = preset("dppo-topk-tv")
PART = "step-00000001.rank-0000.parquet"


def record(folder, region=REGION, **more):
    usual = {"sample": 1.0, "topk": True, "ring_steps": 1, "triggers": (QuantileAbove(of="log_ratio", level=0.0),)}
    made = Recorder(Recording(folder=folder, **usual | more), region, rank=0)
    for step in (0, 1):
        made.add_sequences(batches.sequence_rows(range(8)), step=step)
        b = batches.batch(seed=step, region=REGION, k=20, proximal=True)
        made.add(None if region is None else b.out, b.policy, b.rollout, sequences=b.sequences, step=step)
        made.end_step(step, b.out.sums)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return record(tmp_path_factory.mktemp("run") / "records")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "records")


def check(capsys, *addresses):
    code = main(["records", "check", "--json", *map(str, addresses)])
    (found,) = json.loads(capsys.readouterr().out)["records"]
    return code, found


def test_a_record_is_valid_as_a_folder_a_run_and_a_file(whole, capsys):
    code, found = check(capsys, whole)
    assert (code, found["valid"], found["versions"], found["findings"]) == (0, True, [VERSION], [])
    tokens = sum(
        pq.read_metadata(file).num_rows for file in [*whole.glob("*.parquet"), *whole.glob("dump-*/*.parquet")]
    )
    assert (found["files"], found["rows"]) == (7, {"tokens": tokens, "sequences": 16, "texts": 16})
    assert check(capsys, whole.parent)[1]["files"] == 7
    for file in (whole / PART, whole / "sequences" / PART, whole / "texts" / PART):
        assert check(capsys, file)[:1] == (0,)


def test_a_record_without_a_region_or_without_texts_is_valid(tmp_path, capsys):
    folder = record(tmp_path / "records", None)
    assert check(capsys, folder)[0] == 0
    shutil.rmtree(folder / "texts")  # to share it
    assert check(capsys, folder)[0] == 0


def test_findings_are_lines_and_several_addresses_are_checked(folder, whole, capsys):
    (folder / "run.json").unlink()
    assert main(["records", "check", str(whole), str(folder)]) == 1
    said = capsys.readouterr()
    assert said.out == f"error: `{folder}/run.json` must exist since version 3.\n"
    assert [line.split(": ")[1].split(";")[0] for line in said.err.splitlines()] == ["valid", "not valid"]


def test_wrong_usage_is_2(tmp_path, capsys):
    assert main(["records", "check", str(tmp_path / "nowhere")]) == 2
    assert main(["records", "check", "nowhere://x"]) == 2
    assert main(["records", "look", str(tmp_path)]) == 2
    assert main(["records", "check"]) == 2


def rewrite(file, change=None, metadata=None, counts=None, **more):
    """Writes the file again with changed rows; `change` takes and returns columns as lists."""
    with pq.ParquetFile(file) as opened:
        table, own = opened.read(), opened.metadata.metadata
    columns = table.to_pydict()
    if change is not None:
        change(columns)
    schema = table.schema.with_metadata({**table.schema.metadata, **(metadata or {})})
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    with pq.ParquetWriter(file, schema) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema), **more)
        step = counts if counts is not None else own.get(STEP_KEY, b"").decode()
        writer.add_key_value_metadata({STEP_KEY.decode(): step} if step else {})
    sealed(file)


def at(name, value, row=0):
    def change(columns):
        columns[name][row] = value

    return change


def everywhere(name, value):
    def change(columns):
        columns[name] = [value] * len(columns[name])

    return change


@pytest.mark.parametrize(
    ("file", "how", "level", "says"),
    [
        (PART, {"change": at("policy_logp", 0.5)}, "warning", "must have a log-prob ≤ 0 in policy_logp, got 1 rows"),
        (PART, {"change": at("behavior_logp", float("nan"))}, "warning", "a log-prob ≤ 0 in behavior_logp"),
        (PART, {"change": at("advantage", float("inf"))}, "warning", "must have a finite advantage"),
        (PART, {"change": at("topk_logp", [0.0] * 20)}, "warning", "topk_logp of total probability ≤ 1, got 1 rows"),
        (PART, {"change": at("topk_logp", [-9.0])}, "error", "as many topk_logp as topk_ids, got 1 rows"),
        (PART, {"change": at("position", -1)}, "error", "must have position ≥ 0"),
        (PART, {"change": at("divergence_lower", 2.0)}, "error", "0 ≤ divergence_lower ≤ divergence_upper"),
        (PART, {"change": everywhere("kept_ids", [])}, "error", "at least one id in kept_ids"),
        (PART, {"change": at("step", 9)}, "error", "have the step of its name (1) in the column step"),
        (PART, {"change": at("rank", 9)}, "error", "have the rank of its name (0) in the column rank"),
        (PART, {"change": at("sequence", 99)}, "error", "must have its sequences in sequences/, got 1 that are not"),
        (PART, {"change": at("entropy", None)}, "error", "must have entropy in all rows or in none"),
        (PART, {"change": everywhere("kept", None)}, "error", "must have kept exactly if a region decided"),
        (PART, {"metadata": {b"trustrl.region": b"null"}}, "error", "must have weight exactly if a region decided, got a file without"),
        (PART, {"metadata": {VERSION_KEY: str(VERSION + 1).encode()}}, "error", "Install a newer trustrl"),
        (PART, {"counts": '{"rows": 1, "tokens_in_loss": 1}'}, "error", "rows that its metadata counts"),
        (PART, {"counts": "[]"}, "error", "its counts of tokens in the metadata"),
        (f"sequences/{PART}", {"change": at("sequence", 1)}, "error", "must have each sequence once, got 1 rows"),
        (f"sequences/{PART}", {"change": at("completion_tokens", -1)}, "error", "must have completion_tokens ≥ 0"),
        (f"sequences/{PART}", {"change": at("reward", float("nan"))}, "warning", "must have a finite reward"),
        (f"sequences/{PART}", {"change": at("text", "gone")}, "error", "must name a text file that exists, got 1"),
        (f"texts/{PART}", {"change": at("sequence", 99)}, "error", "must name a text file that exists, got 1"),
        (f"texts/{PART}", {"metadata": {b"trustrl.table": b"tokens"}}, "error", "must be a file of the texts table"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(file, how, level, says, folder, capsys):
    rewrite(folder / file, **how)
    code, found = check(capsys, folder)
    findings = [(one["level"], one["text"]) for one in found["findings"] if says in one["text"]]
    assert [one[0] for one in findings] == [level], found["findings"]
    assert code == (1 if level == "error" else 0)
    assert any(one["file"].endswith(PART) for one in found["findings"])


def test_every_rule_on_values_can_be_broken():
    """The cases above break each kind of rule; these break the rest of their columns."""
    base = {"topk_ids": [[1]], "topk_logp": [[-1.0]], "divergence_upper": [1.0]}
    for table, rules in value_checks.RULES.items():
        for rule in rules:
            bad = {"kept_ids": [[]], "topk_logp": [[0.1]]}
            columns = base | {
                name: bad.get(name, [-1.0 if "≥ 0" in rule.text or "≤ d" in rule.text else float("nan")])
                for name in rule.columns
            }
            if rule.text.startswith("have as many"):
                columns |= {"topk_ids": [[1]], "topk_logp": [[-1.0, -1.0]]}
            if "total probability" in rule.text:
                columns["topk_ids"] = [[1]]
            batch = pa.record_batch({name: columns[name] for name in rule.columns})
            assert (rule.text, 1) in [(one.text, num) for one, num in value_checks.breaches(batch, table)], rule.text


def test_nulls_padding_and_impossible_ids_have_no_mass():
    batch = pa.record_batch({"topk_ids": [[1, -1], None], "topk_logp": [[-0.1, -0.1], None]})
    assert list(value_checks.breaches(batch, "tokens")) == []


def test_large_row_groups_are_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(record_check, "MAX_GROUP", 10)
    assert any("row groups of at most 10 rows" in one["text"] for one in check(capsys, folder)[1]["findings"])


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / PART).write_bytes((f / PART).read_bytes()[:-9]), "must be a complete Parquet file"),
        (lambda f: (f / PART).rename(f / "step-1.parquet"), "must be named step-XXXXXXXX.rank-XXXX.parquet"),
        (lambda f: (f / "run.json").write_text("{"), "must be JSON, got"),
        (lambda f: (f / "run.json").write_text("{}"), "run.region must be present"),
        (lambda f: (f / "dump-00000000" / "trigger.rank-0000.json").write_text("[]"), "must be a JSON object"),
        (lambda f: (f / "dump-00000000" / "trigger.rank-0000.json").unlink(), "The dump is incomplete"),
        (lambda f: [shutil.rmtree(f), f.mkdir()], "must contain files named"),
    ],
)
def test_broken_files_and_names_are_found(break_it, says, folder, capsys):
    break_it(folder)
    code, found = check(capsys, folder)
    assert any(says in one["text"] for one in found["findings"]), found["findings"]
    assert code == (0 if "incomplete" in says else 1)


def test_a_record_without_a_region_is_audited(tmp_path, capsys):
    """Other regions are replayed, and no verdict is recorded that they could be compared with."""
    same = record(tmp_path / "region")
    folder = record(tmp_path / "records", None)
    found = []
    for one in (folder, same):
        assert main(["audit", str(one), "--regions", "ppo,dppo-binary-tv", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    without, with_one = found
    assert (without["recorded"], without["reproduced"]["rows"]) == ([], 0)
    assert without["regions"]["recorded"]["how"] == "left out"
    for name in ("ppo", "dppo-binary-tv"):
        for key in ("how", "rows", "signed", "stopped", "stopped_at_most"):
            assert without["regions"][name][key] == with_one["regions"][name][key]
        assert without["regions"][name]["stopped"] > 0
        assert list(without["agreement"][name]) == ["ppo", "dppo-binary-tv"]
    assert main(["audit", str(folder)]) == 0
    assert "no region decided when these records were written" in capsys.readouterr().out
