"""Rehearsals of the papers' experiments on TRL: a dense Qwen2, and a mixture of experts with adapters."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")
pytest.importorskip("math_verify")

from support.rehearsals import check, rehearse
from trustrl.runner.recipe import Recipe, load
from trustrl.runner.rehearsal import rehearsed


@pytest.mark.parametrize(("name", "more"), [("dppo-sanity", []), ("dppo-moe", ["lora.rank=32"])])
def test_a_papers_experiment_is_rehearsed_with_one_command(name, more, tmp_path):
    plain = load(name, more).to_dict()
    del plain["layout"]  # verl's alone
    recipe = Recipe.from_dict({**plain, "engine": {"name": "trl", "device": "cuda", "ranks_per_node": 8}})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    rehearsal, said = rehearse(tmp_path, "recipe.toml")
    assert (rehearsal, [change for change in rehearsed(recipe, vllm=False)[1] if change not in said]) == (
        rehearsed(recipe, vllm=False)[0], [],
    )  # fmt: skip
    check(tmp_path, rehearsal)
