"""Recipes: a file, its overrides, and what is refused."""

import tomllib
from pathlib import Path

import pytest

import trustrl
from support.recipes import ROOT, SHIPPED, SMALL, TRIGGERS, small
from trustrl import regions
from trustrl.cli import main
from trustrl.errors import ConfigError, TrustRLError
from trustrl.recording import EntropySlope, NonFinite, Recording
from trustrl.runner import recipe_files
from trustrl.runner.recipe import Recipe, load

ARMS = ROOT / "recipes/evidence"
EVIDENCE = [ARMS / f"{name}.toml" for name in ("on-policy", "stale", "mismatch", "both")]


def test_the_shipped_recipes_are_the_known_ones():
    assert [file.stem for file in SHIPPED] == [
        "dppo-dense", "dppo-lora", "dppo-moe-r3", "dppo-moe-thinking", "dppo-moe-verl", "dppo-moe", "dppo-sanity",
        "gsm8k", "mismatch", "qwen3-128gpu", "qwen3-8gpu", "qwen3-moe-megatron", "sanity", "smollm2", "staleness", "tour",
        "troll-dr-grpo", "troll-eurus", "troll-grpo", "troll-gsm8k", "troll-gspo", "troll-ppo", "verl-tour",
    ]  # fmt: skip


@pytest.mark.parametrize("file", SHIPPED + EVIDENCE, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_shipped_recipe_loads_and_has_the_name_of_its_file(file):
    assert load(file).name == file.stem


@pytest.mark.parametrize("name", trustrl.presets())
def test_a_recipe_survives_dictionaries_and_toml_with_any_region(name):
    recipe = small(f"region.preset={name}")
    assert recipe.region == trustrl.preset(name)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert tomllib.loads(recipe.to_toml()) == recipe.to_dict()
    assert Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe


def test_records_survive_dictionaries_and_toml_and_go_to_the_run_s_folder():
    recipe = small("records.sample=0.5", TRIGGERS)
    triggers = (EntropySlope(max_fall=0.05), NonFinite(at_most_every=7))
    assert recipe.recording(Path("run")) == Recording(folder="run/records", sample=0.5, triggers=triggers)
    assert tomllib.loads(recipe.to_toml()) == recipe.to_dict()
    assert Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe
    assert recipe.to_dict()["records"]["max_dumps"] == 10, "defaults are written out"


def test_an_array_of_tables_in_a_file_is_the_same_as_a_list_on_the_command_line(tmp_path):
    tables = '[[records.triggers]]\nkind = "entropy-slope"\nmax_fall = 0.05\n'
    tables += '[[records.triggers]]\nkind = "non-finite"\nat_most_every = 7\n'
    file = tmp_path / "small.toml"
    file.write_text(recipe_files.dumps(SMALL) + tables)
    assert load(file) == small(TRIGGERS)


def test_nothing_is_recorded_unless_the_recipe_says_so():
    assert small().recording(Path("run")) is None
    assert "records" not in small().to_dict()
    assert Recipe.from_dict(SMALL | {"records": {}}).records is not None


def test_a_preset_keeps_what_is_not_overridden():
    region = small("region.preset=dppo-topk-tv", "region.divergence.k=7", "region.max_ratio=5.0").region
    assert region == regions.DPPO(regions.TopKTV(k=7), max_ratio=5.0)


def test_one_bound_laid_over_a_preset_sets_both_where_they_were_equal():
    assert small("region.divergence.max_increase=0.2").region.divergence.bounds == (0.2, 0.2)
    assert small("region.preset=trm", "region.statistic.max_increase=0.1").region.statistic.bounds == (0.1, 0.1)
    assert small("region.preset=ppo", "region.ratio.max_increase=0.5").region.ratio.bounds == (0.2, 0.5)


def test_another_kind_of_divergence_replaces_the_preset_s():
    region = small('region.divergence={kind="topk-tv", k=7}').region
    assert region.divergence == regions.TopKTV(k=7)


def test_a_region_is_chosen_whole():
    """The recipe's own bound must not be laid over another region."""
    recipe = Recipe.from_dict(
        recipe_files.override(SMALL | {"region": {"preset": "dppo-binary-tv", "max_ratio": 3.0}}, ["region.preset=ppo"])
    )
    assert recipe.region == trustrl.preset("ppo")


def test_a_region_may_be_described_in_full():
    data = SMALL | {"region": {"kind": "dppo", "divergence": {"kind": "binary-kl", "max_increase": 0.1}}}
    assert Recipe.from_dict(data).region == regions.DPPO(regions.BinaryKL(max_increase=0.1))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        pytest.param("shedule.steps=3", "Did you mean 'schedule'?", id="a table that does not exist"),
        pytest.param("schedule.step=3", "Did you mean 'steps'?", id="a key that does not exist"),
        pytest.param("region.preset=dppo-binary-tvv", "Did you mean 'dppo-binary-tv'?", id="an unknown preset"),
        pytest.param("region.divergence.max_increse=0.1", "Did you mean 'max_increase'?", id="an unknown bound"),
        pytest.param("schedule.steps=7", "multiple of updates_per_batch", id="a batch left half used"),
        pytest.param("schedule.steps=0", "whole number ≥ 1", id="no steps"),
        pytest.param("schedule.steps=true", "whole number ≥ 1", id="a truth for a number"),
        pytest.param("schedule.checkpoint_every=3", "multiple of updates_per_batch", id="a checkpoint in a batch"),
        pytest.param("schedule.completions_per_prompt=1", "whole number ≥ 2", id="a group of one"),
        pytest.param(
            "schedule.mean_completion_tokens=5", "at most max_completion_tokens, 4, got 5", id="a mean above all"
        ),
        pytest.param("sampler.kind=sglang", "must be one of 'transformers', 'vllm'", id="an unknown sampler"),
        pytest.param(
            "sampler.ranks=3", "must divide engine.ranks_per_node", id="a sampler on more GPUs than there are"
        ),
        pytest.param("engine.ranks_per_node=3", "multiple of the 3 ranks", id="ranks that do not divide a step"),
        pytest.param("engine.micro_batch=5", "must divide a rank's share", id="a micro-batch that does not divide"),
        pytest.param("task.problems=2", "at least the 4 prompts", id="fewer problems than a batch has"),
        pytest.param("task.chat=1", "must be true or false", id="a number for a truth"),
        pytest.param("optimiser.learning_rate=0", "a number > 0", id="no learning rate"),
        pytest.param('model.name=""', "must be a non-empty string", id="an empty name"),
        pytest.param("name=3", "must be a non-empty string", id="a number for a name"),
        pytest.param("schedule=3", "must be a table", id="a number for a table"),
        pytest.param("name.x=3", "must be a table", id="a key in a text"),
        pytest.param("records.smaple=1.0", "Did you mean 'sample'?", id="an unknown key of records"),
        pytest.param("records.folder=here", "records.folder must be left out", id="another folder for records"),
        pytest.param("records.sample=2.0", "a share in [0, 1]", id="twice as many records as tokens"),
        pytest.param("records=true", "must be a table", id="a truth for the records"),
        pytest.param(
            'records.triggers=[{kind="non-finit"}]', "Did you mean 'non-finite'?", id="an unknown kind of trigger"
        ),
        pytest.param(
            'records.triggers=[{kind="non-finite", at_most_evry=1}]',
            "Did you mean 'at_most_every'?",
            id="an unknown key of a trigger",
        ),
        pytest.param("schedule.steps", "<table>.<key>=<value>", id="no value"),
        pytest.param("schedule.steps=[1", "must be a TOML value", id="half a list"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(override, said):
    with pytest.raises(TrustRLError, match=r"must|has no|Unknown") as caught:
        small(override)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        pytest.param("optimiser.schedule=linear", "'constant' or 'cosine'", id="a schedule verl does not have"),
        pytest.param("optimiser.warmup_steps=3", "verl counts batches", id="a warm-up of one and a half batches"),
        pytest.param("evaluation.every=3", "verl counts batches", id="an evaluation within a batch"),
        pytest.param("engine.device=cuda", "must be 'vllm'", id="the CPU's sampler on GPUs"),
    ],
)
def test_what_verl_does_not_do_is_refused_in_a_sentence(override, said):
    with pytest.raises(ConfigError, match=said):
        small("engine.name=verl", override)


def test_a_missing_table_is_named():
    with pytest.raises(ConfigError, match="A recipe must have optimiser"):
        Recipe.from_dict({key: value for key, value in SMALL.items() if key != "optimiser"})


@pytest.mark.parametrize("text", [None, "a = [", b"\xff\xfe"], ids=["no file", "no TOML", "no text"])
def test_a_file_that_is_no_recipe_is_refused_in_a_sentence(tmp_path, text):
    file = tmp_path / "broken.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="must be"):
        load(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1), ("a.b=1e-4", 1e-4), ("a.b=true", True), ('a.b="x y"', "x y"), ("a.b=word-1.5", "word-1.5"),
        ("a.b=Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("a.b=[1, 2]", [1, 2]), ("a.b=inf", float("inf")),
        ("a.b=./folder", "./folder"),
    ],
)  # fmt: skip
def test_a_value_on_the_command_line_is_toml_or_one_word(text, value):
    assert recipe_files.read_override(text) == (("a", "b"), value)


def test_toml_with_odd_keys_and_values_reads_back():
    data = {"x y": 1, "t": {"+a.b": [1, 'ü"\\\n\t', {"k": True}], "empty": {}, "deep": {"z": 1e-5}}, "s": {}}
    assert tomllib.loads(recipe_files.dumps(data)) == data


@pytest.mark.parametrize(
    "name",
    ["../../x", "/tmp/x", "a/b", "a\\b", ".", "..", "a\n", "\x1b[2J", "a\x00b", "\u202egnp", "\ud800", ""],
    ids=ascii,
)
def test_a_name_that_is_not_one_folder_s_is_refused(name):
    with pytest.raises(
        ConfigError, match=r"name must (be one name|be a non-empty string|not contain control characters)"
    ):
        Recipe.from_dict({**SMALL, "name": name})


@pytest.mark.parametrize("name", ["tour", "my run", "größe-0.1_b", "...", ".hidden"])
def test_a_name_of_one_folder_is_taken(name):
    assert Recipe.from_dict({**SMALL, "name": name}).name == name


def test_a_run_does_not_leave_runs_by_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    (tmp_path / "bad.toml").write_text(recipe_files.dumps({**small().to_dict(), "name": "../../x"}))
    for verb in ("run", "plan"):
        assert main([verb, str(tmp_path / "bad.toml")]) == 2
        assert "name must be one name without '/'" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["bad.toml", "deeper"]


ALGORITHM = [
    "advantage.divide_by_std=false", "loss.reduction=constant", "loss.kl=0.01", "lora.rank=8", "lora.targets=['q_proj', 'v_proj']",
]  # fmt: skip


def test_the_algorithm_around_the_region_is_said_once_for_both_engines():
    from trustrl.runner.plan import plan

    on_trl = plan(small(*ALGORITHM)).engine
    fields = {name: on_trl["GRPOConfig"][name] for name in ("loss_type", "scale_rewards", "beta")}
    assert fields == {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.01}
    assert on_trl["TrustRegionGRPOTrainer"]["peft_config"] == {
        "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    command = plan(small(*ALGORITHM, "engine.name=verl")).engine["command"]
    assert {
        "algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "actor_rollout_ref.actor.loss_scale_factor=4",
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01",
        "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16",
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj]", "actor_rollout_ref.rollout.load_format=safetensors",
    } <= set(command)  # fmt: skip


def test_a_critic_starts_from_the_model():
    from trustrl.runner.plan import plan

    critic = [
        "engine.name=verl",
        "advantage.estimator=gae",
        "advantage.lam=0.95",
        "advantage.critic_learning_rate=1e-5",
    ]
    command = set(plan(small(*critic)).engine["command"])
    assert {
        "algorithm.adv_estimator=gae", "algorithm.lam=0.95", "algorithm.gamma=1.0", "critic.model.path=tiny",
        "critic.optim.lr=1e-05", "critic.ppo_mini_batch_size=4",
    } <= command  # fmt: skip


@pytest.mark.parametrize("override", ["advantage.estimator=gae", "advantage.estimator=rloo", "loss.entropy=0.1"])
def test_trl_has_group_advantages_only(override):
    with pytest.raises(ConfigError, match="Only verl has the others"):
        small(override)


def test_adapters_need_less_memory_than_the_model():
    from trustrl.runner.plan import plan

    full, adapters = (plan(small("model.name=smollm2-135m", *more)).memory for more in ([], ["lora.rank=32"]))
    assert full["adam"] == 2 * full["weights"] == 2 * 4 * 134_515_008
    assert adapters["weights"] == full["weights"]
    # Rank × (rows + columns) of the seven matrices in each of the 30 layers: sizes 576, 192 and 1,536.
    exact = 32 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert adapters["gradients"] == pytest.approx(4 * exact, rel=0.05)
    assert adapters["adam"] == 2 * adapters["gradients"]


def test_own_data_survive_dictionaries_and_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = {key: value for key, value in SMALL.items() if key != "task"}
    data = {"files": "mine.jsonl", "where": {"level": [1, 2]}, "columns": ["level"]}
    recipe = Recipe.from_dict({**tables, "data": data, "reward": [{"function": "exact"}, {"function": "r.py:score"}]})
    assert recipe.task.label == "mine"
    assert recipe.to_dict()["data"][0]["files"] == [str(tmp_path / "mine.jsonl")]
    assert recipe.to_dict()["reward"][1]["function"] == str(tmp_path / "r.py:score")
    assert "task" not in recipe.to_dict()
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe
    for more, said in (
        ({"data": data}, "must have [reward]"), ({"reward": {"function": "exact"}}, "must have [reward]"),
        ({"data": data, "reward": {"function": "exact"}, "task": {"name": "arithmetic"}}, "got both"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as raised:
            Recipe.from_dict({**tables, **more})
        assert said in str(raised.value)


@pytest.mark.parametrize(("override", "said"), [
    ("task.name=arithmetik", "Did you mean 'arithmetic'"), ("task.settings={digit=3}", "has no setting 'digit'"),
])  # fmt: skip
def test_a_plan_checks_the_task(override, said):
    from trustrl.runner.plan import plan

    with pytest.raises(TrustRLError) as raised:
        plan(small(override))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.files=5", "data.files=[5]", "data.files=true", "data.held_out_files=5", "data.columns=5",
        "data.columns=[5]", "data.hub=[5]", "data.subset=5", "data.split=5", "data.held_out_split=5", "data.name=5",
        "data.prompt=5", "data.answer=[5]", "data.where=5", "data.template=5", "data.system=5",
        "evaluation.pass_at=8", "evaluation.pass_at=true", "evaluation.sets=5", "evaluation.sets={a=1}",
        "evaluation.sets=[{data=[5]}]", 'evaluation.sets=[{data="a",name={a=1}}]',
        'evaluation.sets=[{data="a",pass_at=8}]', "lora={rank=4,targets=5}", "lora={rank=4,targets=[5]}",
        "lora={rank=4,targets={a=1}}",
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_in_a_sentence(override):
    with pytest.raises(ConfigError, match=r"must be|must have"):
        load("gsm8k", [override])


def test_a_recipe_extends_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(recipe_files.dumps(SMALL))
    (tmp_path / "own.toml").write_text(
        'name = "own"\nextends = "base.toml"\n[schedule]\nsteps = 4\n[region]\npreset = "troll"\n'
    )
    recipe = load("own.toml", ["schedule.seed=3"])
    assert (recipe.name, recipe.schedule.steps, recipe.schedule.prompts_per_step) == ("own", 4, 4)
    assert (recipe.schedule.seed, recipe.region.kind, recipe.optimiser.learning_rate) == (3, "troll", 1e-4)
    (tmp_path / "data.toml").write_text(
        'extends = "own.toml"\n[data]\nfiles = "a.jsonl"\n[reward]\nfunction = "exact"\n'
    )
    assert load("data.toml").task.label == "a"
    (tmp_path / "base.toml").write_text('extends = "own.toml"\n')
    with pytest.raises(ConfigError, match="must not lead back"):
        load("own.toml")
