"""The tiny model, its tokenizer and its pre-training."""

import json
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs "trustrl[models]"')

import trustrl
from trustrl.runner.model_shape import KNOWN
from trustrl.world import models
from trustrl.world.models import pretrain, tiny
from trustrl.world.models.pretrain import Pretraining, greedy_accuracy, sampled_accuracy
from trustrl.world.models.tiny import Tiny
from trustrl.world.tasks import Arithmetic

SHORT = Pretraining(
    model=Tiny(num_layers=1, hidden_size=64, vocab_size=128), task=Arithmetic(digits=1, held_out=0.2), steps=3
)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    return tmp_path


# --- tokenizer ---


@pytest.fixture(scope="module", params=["made", "saved and loaded"])
def tokenizer(request, tmp_path_factory):
    if request.param == "made":
        return tiny.tokenizer()
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.tokenizer().save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["07+45=052", "It's 1 , 2 . ok ?\n\n  Yes!", "".join(tiny.CHARACTERS)])
def test_text_comes_back_character_by_character(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_unknown_characters_are_one_token_each(tokenizer):
    assert tokenizer("é漢").input_ids == [tokenizer.unk_token_id] * 2


def test_every_id_has_a_text_of_its_own(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 512
    assert len({tokenizer.decode([i]) for i in range(512)}) == 512


def test_padding_is_on_the_left(tokenizer):
    batch = tokenizer(["1+1=", "1="], padding=True)
    assert batch.input_ids[1][:2] == [tokenizer.pad_token_id] * 2
    assert batch.attention_mask[1] == [0, 0, 1, 1]


def test_special_tokens_differ_and_are_skipped(tokenizer):
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert len(set(ids)) == 4
    assert tokenizer.decode([*ids, *tokenizer("7").input_ids], skip_special_tokens=True) == "7"


def test_the_chat_template_ends_turns_with_the_end_token(tokenizer):
    chat = [{"role": "user", "content": "7+4?"}, {"role": "assistant", "content": "11"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|im_start|>user\n7+4?<eos>\n<|im_start|>assistant\n11<eos>\n"
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked)
    assert tokenizer(text).input_ids.count(tokenizer.eos_token_id) == 2


# --- weights ---


def test_the_weights_follow_from_the_seed_alone():
    stream = torch.random.get_rng_state()
    first = tiny.model(Tiny()).state_dict()
    assert torch.equal(torch.random.get_rng_state(), stream)
    torch.randn(3)
    assert same(tiny.model(Tiny()).state_dict(), first)
    assert not same(tiny.model(Tiny(seed=1)).state_dict(), first)


@pytest.mark.parametrize(("family", "normalises"), [("qwen3", True), ("llama", False)])
def test_the_blocks_are_the_familys(family, normalises):
    model = tiny.model(Tiny(family=family))
    assert model.config.model_type == family
    assert any("q_norm" in name for name, _ in model.named_parameters()) == normalises


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("tiny", Tiny()),
        ("tiny-tied", Tiny(tied=True)),
        ("tiny-long", Tiny(num_layers=2)),
        ("tiny-long-llama", Tiny(num_layers=2, family="llama")),
    ],
)
def test_a_plan_knows_how_large_they_are(name, made):
    model = tiny.model(made)
    size = (sum(p.numel() for p in model.parameters()), made.hidden_size, made.vocab_size)
    assert KNOWN[name] == size


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_head_is_the_embedding_only_where_asked(tied):
    model = tiny.model(Tiny(tied=tied))
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    assert model.config.tie_word_embeddings == tied
    assert model.lm_head.weight.shape == (512, 128)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param({"vocab_size": 50}, "Every character needs an id", id="too few ids"),
        pytest.param({"hidden_size": 100}, "multiple of 64, got 100", id="heads that do not fit"),
        pytest.param({"family": "gpt2"}, "must be one of 'qwen3', 'llama', got 'gpt2'", id="a family we do not make"),
        pytest.param({"num_layers": 0}, "whole number ≥ 1, got 0", id="no layers"),
    ],
)
def test_shapes_that_cannot_be_are_refused(settings, says):
    with pytest.raises(trustrl.errors.ConfigError) as caught:
        Tiny(**settings)
    assert says in str(caught.value)


# --- pre-training ---


def test_pre_training_gives_the_same_weights_bit_for_bit():
    """Whatever torch's stream and thread count were; and both are left as they were."""
    settings = replace(SHORT, batch_size=512)  # large enough that two threads would share the sums
    threads, stream = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(1)
    first = pretrain.trained(settings)[0].state_dict()
    assert torch.equal(torch.random.get_rng_state(), stream)
    torch.randn(3)
    torch.set_num_threads(2)
    try:
        second = pretrain.trained(settings)[0].state_dict()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert same(first, second)
    assert not same(first, tiny.model(SHORT.model).state_dict())
    assert not same(first, pretrain.trained(replace(settings, seed=1))[0].state_dict())


def test_digits_have_their_own_shares_in_turn():
    settings = replace(SHORT, corrupted=(0.4, 0.0), batch_size=20_000)
    ids, prompt = next(pretrain._batches(settings, tiny.tokenizer(settings.model.vocab_size)))
    rows = settings.task.rows("train")
    right = {row["prompt"]: row["answer"] for row in rows}
    tokenizer = tiny.tokenizer(settings.model.vocab_size)
    texts = tokenizer.batch_decode(ids[:4000], skip_special_tokens=True)
    wrong = [[a != b for a, b in zip(text[prompt:], right[text[:prompt]], strict=True)] for text in texts]
    shares = torch.tensor(wrong).float().mean(0)
    assert shares[0] == pytest.approx(0.4, abs=0.03)
    assert shares[1] == 0.0


def test_the_share_of_corrupted_digits_is_the_one_asked_for():
    settings = replace(SHORT, corrupted=0.3, batch_size=20_000)
    tokenizer = tiny.tokenizer()
    ids, prompt = next(pretrain._batches(settings, tokenizer))
    right = wrong = 0
    for text in tokenizer.batch_decode(ids):
        question, answer = text[: prompt - 1], text[prompt:].removesuffix("<eos>")
        assert len(answer) == 2
        digits = zip(answer, str(sum(map(int, question.split("+")))).zfill(2), strict=True)
        agree = [a == b for a, b in digits]
        right, wrong = right + sum(agree), wrong + len(agree) - sum(agree)
    assert wrong / (right + wrong) == pytest.approx(0.3, abs=0.01)


def test_held_out_problems_are_never_trained_on():
    settings = replace(SHORT, corrupted=0.0, batch_size=5_000)
    ids, prompt = next(pretrain._batches(settings, tokenizer := tiny.tokenizer()))
    seen = {text[:prompt] for text in tokenizer.batch_decode(ids)}
    assert seen == {row["prompt"] for row in settings.task.rows("train")}


def test_the_cache_is_reused_and_says_what_it_holds(empty_cache, capsys, monkeypatch):
    folder = pretrain.pretrained(SHORT)
    assert "step 3 of 3" in capsys.readouterr().err
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(pretrain, "trained", None)  # calling it again would fail
    assert pretrain.pretrained(SHORT) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights
    about = json.loads((folder / "trustrl.json").read_text())
    assert about["settings"]["model"]["hidden_size"] == 64
    assert about["settings"]["task"] == {"digits": 1, "held_out": 0.2, "seed": 0}
    assert about["versions"]["transformers"] == transformers.__version__
    assert 0 <= about["held_out"]["greedy"] <= 1


def test_what_is_loaded_is_what_was_trained(empty_cache):
    trained, _ = pretrain.trained(SHORT)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(pretrain.pretrained(SHORT))
    assert same(trained.state_dict(), loaded.state_dict())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_an_interrupted_training_leaves_nothing(empty_cache, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "sampled_accuracy", interrupted)  # the weights are written by then
    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrained(SHORT)
    assert not list(empty_cache.iterdir())


@pytest.mark.parametrize(
    "changed",
    [
        {"model": replace(SHORT.model, tied=True)}, {"task": Arithmetic()}, {"corrupted": 0.1}, {"steps": 4},
        {"batch_size": 8}, {"learning_rate": 1e-3}, {"seed": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_every_setting_has_its_own_place_in_the_cache(changed):
    assert replace(SHORT, **changed).key != SHORT.key
    assert replace(SHORT).key == SHORT.key


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param({"corrupted": 1.0}, "share in [0, 1) or several of them, got 1.0", id="nothing right"),
        pytest.param({"corrupted": (0.1, -0.1)}, "got (0.1, -0.1)", id="one share below 0"),
        pytest.param({"corrupted": ()}, "got ()", id="no share"),
        pytest.param({"steps": 0}, "whole number ≥ 1, got 0", id="no steps"),
        pytest.param(
            {"model": "tiny"},
            "must be a Tiny, got 'tiny'. Create one, for example trustrl.world.models.tiny.Tiny()",
            id="a name for a shape",
        ),
    ],
)
def test_trainings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(trustrl.errors.ConfigError) as caught:
        Pretraining(**settings)
    assert says in str(caught.value)


# --- the real one: seconds from the cache, a minute of one core without ---


@pytest.fixture(scope="module", params=["tiny", "tiny-tied"])
def real(request):
    folder = models.path(request.param)
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


@pytest.mark.slow
def test_the_real_model_is_often_wrong_and_knows_better(real):
    """Room to improve, and something to build on: what every training run here starts from."""
    model, tokenizer = real
    for seed in range(3):
        assert 0.2 < sampled_accuracy(model, tokenizer, Arithmetic(), 500, seed) < 0.8
    assert greedy_accuracy(model, tokenizer, Arithmetic(), 500) > 0.9


@pytest.mark.slow
def test_its_answers_end_where_they_should(real):
    """Four tokens are enough: three digits and the end."""
    model, tokenizer = real
    four, eight = (
        sampled_accuracy(model, tokenizer, Arithmetic(), 300, max_new_tokens=most, seed=1) for most in (4, 8)
    )
    assert abs(four - eight) < 0.1  # another stream of random numbers, but no answer is cut


@pytest.mark.slow
def test_accuracy_follows_from_its_seed_and_disturbs_nothing(real):
    model, tokenizer = real
    model.train()
    stream = torch.random.get_rng_state()
    first, again, other = (sampled_accuracy(model, tokenizer, Arithmetic(), 300, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert model.training


@pytest.mark.slow
def test_more_answers_than_problems_repeat_problems(real):
    """Greedily, twice the same problems score the same."""
    model, tokenizer = real
    few = Arithmetic(digits=2, held_out=0.005)
    n = len(few.rows("held_out"))
    assert 0 < n < 200
    once, twice = (greedy_accuracy(model, tokenizer, few, count) for count in (n, 2 * n))
    assert once == pytest.approx(twice)
