"""The specification of the token record is what the code writes."""

import importlib.util
import json
from pathlib import Path

import pytest

from trustrl.recording.schema import TABLES, VERSION, arrow_schema

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/specification/token-record.md"

_spec = importlib.util.spec_from_file_location("token_record", ROOT / "scripts/token_record.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def test_the_files_are_those_that_the_tool_writes():
    assert tool.page(PAGE.read_text()) == PAGE.read_text(), "Run `python scripts/token_record.py`."
    assert tool.schema_file() == PAGE.with_suffix(".json").read_text(), "Run `python scripts/token_record.py`."


def test_the_page_names_the_version_and_its_history():
    text = PAGE.read_text()
    assert f"**Specification, version {VERSION}.**" in text
    assert all(f"\n| {version} | " in text for version in range(1, VERSION + 1))


def test_the_published_columns_are_those_of_the_files():
    pytest.importorskip("pyarrow")
    published = json.loads(PAGE.with_suffix(".json").read_text())["tables"]
    names = {"int32": "int32", "int64": "int64", "float32": "float", "bool": "bool", "string": "string"}
    for table in TABLES:
        for column, field in zip(published[table]["columns"], arrow_schema(table=table), strict=True):
            assert (column["name"], column["nullable"]) == (field.name, field.nullable)
            kind = column["type"]
            inner = kind.partition("<")[2].rstrip(">").split(", ")
            found = (
                [field.type.key_type, field.type.item_type]
                if kind.startswith("map")
                else [field.type.value_type if kind.startswith("list") else field.type]
            )
            assert [names.get(one, one) for one in (inner if "<" in kind else [kind])] == [str(one) for one in found]


def test_run_json_follows_the_published_schema(tmp_path):
    """Checked by an independent validator, where it is installed."""
    pytest.importorskip("pyarrow")
    jsonschema = pytest.importorskip("jsonschema")
    from trustrl.recording import Recorder, Recording
    from trustrl.regions.presets import preset

    schema = json.loads(PAGE.with_suffix(".json").read_text())["run.json"]
    about = {"engine": {"name": "trl", "version": None}, "sampling": {"temperature": 1, "top_k": None}}
    for region in (preset("ppo"), None):
        Recorder(Recording(folder=tmp_path), region, rank=0, about=about)
        found = json.loads((tmp_path / "run.json").read_text())
        jsonschema.validate(found, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found | {"version": 2}, schema)
