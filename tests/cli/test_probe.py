"""`trustrl probe`: exit codes, JSON, and what it refuses before anything is loaded."""

import json
import sys

import pytest

from trustrl.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([], "MODEL", id="no model"),
        pytest.param(["tiny", "--sampler", "sglang"], "invalid choice", id="an unknown sampler"),
        pytest.param(["tiny", "--dtype", "int4"], "--dtype must be", id="an unknown dtype"),
        pytest.param(["tiny", "--temperature", "0"], "--temperature must be a finite number > 0", id="greedy"),
        pytest.param(["tiny", "--prompts", "nowhere.txt"], "--prompts must be a text file", id="no file"),
        pytest.param(["tinny", "--sampler", "transformers"], "Did you mean 'tiny'?", id="an unknown model"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_sentence(arguments, said, capsys):
    assert main(["probe", *arguments]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""


def test_the_sampler_is_looked_for_before_a_model_is_made(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("trustrl.world.models.path", lambda name: pytest.fail(f"{name} was made"))
    assert main(["probe", "tiny"]) == 1
    assert "pip install vllm" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path, capsys):
    pytest.importorskip("transformers")
    assert main(["probe", str(tmp_path), "--sampler", "transformers"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: MODEL must be a model name or folder with a tokenizer, got ")
    assert said.err.count("\n") == 1


def test_an_empty_file_of_prompts_is_refused(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("\n \n")
    assert main(["probe", "tiny", "--prompts", str(tmp_path / "prompts.txt")]) == 2
    assert "must have at least one non-empty line" in capsys.readouterr().err


@pytest.fixture
def network(tmp_path):
    """A folder with a small Qwen3 and a tokenizer of characters."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", *"0123456789+= "]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        tmp_path
    )
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.5, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_two_sides_that_agree_end_with_0(network, capsys):
    assert main(["probe", network, "--sampler", "transformers", "--dtype", "float32", "--length", "8"]) == 0
    said = capsys.readouterr()
    assert "verdict: agreement" in said.out
    assert "trainer in float32" in said.err


def test_a_planted_fault_ends_with_1_and_its_name(network, capsys):
    given = ["--sampler", "transformers", "--dtype", "float32", "--length", "12", "--top-k", "5", "--json"]
    assert main(["probe", network, *given]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["verdict"]["cause"] == "truncation"
    assert "top-k 5" in made["verdict"]["detail"]
    assert len(made["worst"]) == 5
