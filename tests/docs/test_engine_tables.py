"""The page of engines is what the catalogue says, and the catalogue is what the project holds."""

import ast
import importlib.util
import re
from pathlib import Path

import environment_hashes
import pytest
from engine_evidence import EVIDENCE, status, strongest_test, trains

import trustrl
from trustrl.engines.catalogue import ENGINES, kind_of, supports

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("engine_tables", ROOT / "scripts/engine_tables.py")
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)

every = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def test_the_page_is_written_from_the_catalogue():
    assert tables.page() == tables.PAGE.read_text(), "Run `python scripts/engine_tables.py`."


@every
def test_an_engine_has_an_adapter_a_page_and_tests(engine):
    source = ROOT / "src" / engine.module.replace(".", "/")
    assert source.with_suffix(".py").is_file() or (source / "__init__.py").is_file()
    assert (ROOT / "docs/engines" / engine.page).is_file()
    assert engine.page in (ROOT / "mkdocs.yml").read_text()
    sessions = {
        node.name for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    }
    assert engine.session in sessions


LEAST = {"sampled": 6, "topk": 7, "exact": 2, "projection": 7}
"""Engines that take optimizer steps with each kind of region. They may only become more."""


def test_no_engine_stops_training_a_kind_of_region():
    for kind, least in LEAST.items():
        assert sum(trains(engine, kind) for engine in ENGINES) >= least, kind


@every
def test_every_cell_of_the_table_has_a_test(engine):
    for row in EVIDENCE[engine.name]:
        file, _, name = row.test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, row.test
        assert row.kinds <= engine.kinds
        assert row.anchors <= engine.anchors


@every
def test_every_kind_that_an_engine_supports_has_run_in_it(engine):
    assert set().union(*(row.kinds for row in EVIDENCE[engine.name])) == engine.kinds


def test_a_cell_is_trains_called_refused_or_not_run():
    engines = {engine.name: engine for engine in ENGINES}
    openrlhf, swift, slime = engines["OpenRLHF"], engines["ms-swift"], engines["slime"]
    assert status(openrlhf, "topk", "vLLM", "proximal") == "trains"
    assert status(swift, "topk", "vLLM", "behavior") == "refused"
    assert status(openrlhf, "sampled", "vLLM", "proximal") == "not run"
    assert status(swift, "topk", "trainer", "behavior") == "trains"
    assert status(swift, "exact", "trainer", "proximal") == "refused"
    assert status(slime, "sampled", "recorded batch", "behavior") == "called"
    assert status(engines["TRL"], "exact", "vLLM", "behavior") == "refused"
    assert (strongest_test(openrlhf), strongest_test(slime)) == ("run", "called")


@every
def test_the_newest_release_is_the_one_that_is_installed(engine):
    if not re.fullmatch(r"[\d.]+", engine.versions[0]):
        pytest.skip("not from a registry")
    files = (ROOT / "environments").glob("*.txt")
    pins = {f"{name}=={version}" for file in files for name, version, _ in environment_hashes.pins(file.read_text())}
    assert f"{engine.package}=={engine.versions[0]}" in pins


def test_presets_of_each_kind_are_told_apart():
    kinds = {
        "ppo": "sampled", "dppo-topk-tv": "topk", "dppo-full-kl": "exact", "troll": "projection", "cppo": "topk",
        "score-centering": "projection",
    }  # fmt: skip
    assert {name: kind_of(trustrl.preset(name)) for name in kinds} == kinds
    skyrl = next(engine for engine in ENGINES if engine.name == "SkyRL")
    assert supports(skyrl, trustrl.preset("minirl"))
    assert supports(skyrl, trustrl.preset("troll"))
    assert not supports(skyrl, trustrl.preset("dppo-topk-tv"))
    assert supports(skyrl, trustrl.preset("dppo-topk-tv", anchor="proximal"))
    assert not supports(skyrl, trustrl.preset("dppo-full-tv", anchor="proximal"))


def test_an_engine_is_not_listed_for_a_region_that_it_refuses():
    engines = {engine.name: engine for engine in ENGINES}
    assert supports(engines["RLinf"], trustrl.preset("dppo-binary-tv"))
    assert not supports(engines["RLinf"], trustrl.preset("minirl"))
    assert not supports(engines["prime-rl"], trustrl.preset("tis"))
    assert not supports(engines["AReaL"], trustrl.preset("gspo"))
    assert not supports(engines["ms-swift"], trustrl.preset("dppo-topk-tv"))
    assert supports(engines["ms-swift"], trustrl.preset("dppo-topk-tv", anchor="proximal"))
