"""Settings that the engines refuse: the pages list them all, and every row of a table refuses its example."""

import importlib.util
from pathlib import Path

import pytest

import trustrl
from support.recipes import SMALL
from support.refusal_examples import VERL, cases
from trustrl.engines.refusals import rows, trl, verl, verl_settings
from trustrl.engines.refusals.rows import Refusal, Scope
from trustrl.errors import ConfigError
from trustrl.regions.loading import config_from_dict, config_to_dict, laid_over
from trustrl.runner.plan import plan
from trustrl.runner.recipe import Recipe

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("refusal_tables", ROOT / "scripts/refusal_tables.py")
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


def test_the_page_lists_exactly_what_the_engines_refuse():
    assert tables.PAGE.read_text() == tables.page(), "Run `python scripts/refusal_tables.py`."
    with_rows = {
        file.stem for file in (ROOT / "src/trustrl/engines/refusals").glob("*.py") if "\nROWS" in file.read_text()
    }
    assert set(tables.MODULES) == with_rows


@pytest.mark.parametrize("engine", tables.MODULES)
def test_a_table_s_sentences_are_whole(engine):
    for row in tables.rows(engine):
        setting, must_be, regions, why = tables.cells(row)
        assert all((setting, must_be, regions))
        assert why.endswith(".")
        assert "{" not in setting + must_be + why
        assert f"`{setting}`" in tables.PAGE.read_text()


WORKING = {
    f"{verl.ROLLOUT}.calculate_log_probs": True,
    f"{verl.ACTOR}.strategy": "fsdp2",
    verl.AGENT_LOOP: "trustrl_single_turn_agent",
}
"""Settings that work with every preset that verl supports. Each row's `example` changes one of them."""


def region_of(case):
    return config_from_dict(laid_over(config_to_dict(trustrl.preset(case.preset)), case.region))


def flat(settings):
    def given(path, default):
        return default if settings.get(path) is None else settings[path]

    return given


def id_of(case):
    return f"{case.row.setting} {case.row.scope.words}"


VERL_CASES = cases(verl.ROWS, VERL)


@pytest.mark.parametrize("case", VERL_CASES, ids=id_of)
def test_each_row_of_verl_s_table_refuses_its_example(case):
    """Every row, in the engine's order: the row's own sentence, and no other row's."""
    row = case.row
    settings = dict(WORKING)
    if case.preset == "gspo":
        settings["actor_rollout_ref.actor.loss_agg_mode"] = "seq-mean-token-mean"
    region = region_of(case)
    others = [one for one in verl.ROWS if one is not row]
    rows.check(others, flat(settings | case.settings), region)
    with pytest.raises(ConfigError) as refused:
        rows.check(verl.ROWS, flat(settings | case.settings), region)
    start = row.setting.split("{")[0]
    assert str(refused.value).startswith(f"{start} must be {row.must_be.split('{')[0]}")
    assert row.why.split("{")[-1].split("}")[-1] in str(refused.value)
    if case.settings:
        rows.check(verl.ROWS, flat(settings), region)  # the example is what was refused


PLANNED = [
    case
    for case in VERL_CASES
    if case.settings and case.row.setting != verl.AGENT_LOOP and not case.row.must_be.startswith("set with top_p")
]
"""All but those that plans and the launcher set by themselves, and the one that is a region."""


@pytest.mark.parametrize("case", PLANNED, ids=id_of)
def test_a_plan_refuses_what_each_row_of_verl_s_table_refuses(case):
    recipe = SMALL | {
        "engine": {"name": "verl", "settings": {"actor_rollout_ref.actor.strategy": "fsdp2"} | case.settings},
        "region": config_to_dict(region_of(case)),
    }
    with pytest.raises(ConfigError) as refused:
        plan(Recipe.from_dict(recipe))
    assert str(refused.value).startswith(f"{case.row.setting} must be {case.row.must_be.split('{')[0]}")


@pytest.mark.parametrize("name", trustrl.presets())
def test_no_row_of_verl_refuses_a_preset_with_settings_that_work(name):
    region = trustrl.preset(name)
    settings = dict(WORKING)
    settings["actor_rollout_ref.actor.loss_agg_mode"] = rows.fitting(verl.REDUCTIONS, region)[0]
    settings |= verl_settings.settings_needed(flat(settings), region)
    if rows.EXACT_ON_SAMPLER.holds(region.needs()):
        region = trustrl.preset(name, anchor="proximal")
    rows.check(verl.ROWS, flat(settings), region)


@pytest.mark.parametrize(
    "setting",
    [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"repetition_penalty": 1.1}],
    ids=lambda one: next(iter(one)),
)
def test_trls_asynchronous_trainer_refuses_every_change_of_the_distribution(setting):
    rows.check(trl.ASYNC, rows.reader({}), trustrl.preset("dppo-binary-tv"))
    (name,) = setting
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        rows.check(trl.ASYNC, rows.reader(setting), trustrl.preset("dppo-binary-tv"))


def test_a_reader_finds_settings_in_mappings_and_attributes():
    class Attributes:
        one = {"two": 3}
        none = None

    given = rows.reader({"a": Attributes()})
    assert given("a.one.two", 0) == 3
    assert given("a.none", 5) == given("a.none.more", 5) == given("a.missing.more", 5) == 5


def test_a_row_outside_its_scope_refuses_nothing():
    row = Refusal(
        setting="x",
        must_be="1",
        why="Because.",
        refused=lambda *_: True,
        scope=Scope("none", lambda _: False),
    )
    row.check(flat({}), trustrl.preset("ppo"))
