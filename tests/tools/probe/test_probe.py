"""Faults planted between a sampler's record and a trainer's logits: each is found under its own name."""

import json
import math
from dataclasses import replace

import pytest
import torch

import trustrl
from trustrl.tools.probe import WHAT_TO_DO, probe_report
from trustrl.tools.probe.probe_report import diagnose
from trustrl.tools.probe.sampling import Completion, ProbeSampling, sample_completions
from trustrl.tools.probe.trainer_logprobs import _rerouted, joined, of_logits

N, V = 600, 60


@pytest.fixture(scope="module")
def logits():
    return 2 * torch.randn(N, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def drawn(probabilities):
    return torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(1))


def at(logp, tokens):
    return logp.gather(-1, tokens).squeeze(-1)


def kept(logp, keep):
    """Renormalised over the ids that are kept, written out."""
    return torch.log_softmax(logp.masked_fill(~keep, -torch.inf), -1)


def nucleus(logp, share):
    ordered, ids = logp.exp().sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return kept(logp, torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, before < share))


def most_probable(logp, k):
    return kept(logp, logp >= logp.topk(k, -1).values[..., -1:])


def found(logits, sampler_logp, *, temperature=1.0, record=None):
    """The diagnosis where the sampler draws from one distribution and records another (its own)."""
    tokens = drawn(sampler_logp.exp())
    recorded = at(sampler_logp if record is None else record, tokens)
    return diagnose(recorded, of_logits(logits, tokens.squeeze(-1), temperature))


def test_the_same_distribution_agrees(logits):
    for temperature in (1.0, 0.7):
        diagnosis = found(logits, torch.log_softmax(logits / temperature, -1), temperature=temperature)
        assert diagnosis.cause == "agreement"
        assert diagnosis.is_sound


def test_raw_log_probs_at_a_temperature(logits):
    own = torch.log_softmax(logits / 0.6, -1)
    diagnosis = found(logits, own, temperature=0.6, record=torch.log_softmax(logits, -1))
    assert diagnosis.cause == "raw log-probs"
    assert not diagnosis.is_sound


@pytest.mark.parametrize("sampled_at", [0.7, 1.2])
def test_a_temperature_on_one_side_only(sampled_at, logits):
    diagnosis = found(logits, torch.log_softmax(logits / sampled_at, -1))
    assert diagnosis.cause == "temperature"
    assert f"temperature {sampled_at:g}" in diagnosis.detail
    assert diagnosis.left < 1e-6 < diagnosis.gap


@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
def test_a_nucleus_renormalised_on_one_side_only(share, logits):
    diagnosis = found(logits, nucleus(torch.log_softmax(logits, -1), share))
    assert (diagnosis.cause, diagnosis.detail) == ("truncation", f"the recorded log-probs match top-p {share:g}")


@pytest.mark.parametrize("k", [5, 20])
def test_a_top_k_renormalised_on_one_side_only(k, logits):
    diagnosis = found(logits, most_probable(torch.log_softmax(logits, -1), k))
    assert (diagnosis.cause, diagnosis.detail) == ("truncation", f"the recorded log-probs match top-k {k}")


def test_a_nucleus_is_found_through_the_rounding_of_bf16(logits):
    rounded = torch.log_softmax(logits.bfloat16().double(), -1)
    assert found(logits, nucleus(rounded, 0.8)).detail == "the recorded log-probs match top-p 0.8"


def test_bf16_is_rounding_and_sound(logits):
    diagnosis = found(logits, torch.log_softmax(logits.bfloat16().double(), -1))
    assert diagnosis.cause == "rounding"
    assert diagnosis.is_sound
    assert 1e-3 < diagnosis.gap < 0.02


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_stale_weights_are_not_taken_for_rounding(size, logits):
    noise = size * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert found(logits, torch.log_softmax(logits + noise, -1)).cause == "weights"


def test_a_head_that_stayed_behind_is_a_matter_of_weights(logits):
    """Other logits of the same size: what an unsynced output layer makes of the same hidden states."""
    other = 2 * torch.randn(N, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    diagnosis = found(logits, torch.log_softmax(other, -1))
    assert diagnosis.cause == "weights"
    assert "tied output layer" in WHAT_TO_DO[diagnosis.cause]


def mixture(logits, *, moved, rerouted=None, rounded=True, noise=0.0):
    """The diagnosis of a mixture of experts whose sampler gives the tokens `moved` logits of other experts."""
    g = torch.Generator().manual_seed(4)
    theirs = logits + noise * torch.randn(logits.shape, generator=g, dtype=torch.float64)
    theirs[moved] += torch.randn(logits[moved].shape, generator=g, dtype=torch.float64)
    own = torch.log_softmax(theirs.bfloat16().double() if rounded else theirs, -1)
    tokens = drawn(own.exp())
    readings = replace(of_logits(logits, tokens.squeeze(-1), 1.0), routes=True, rerouted=rerouted)
    return diagnose(at(own, tokens), readings)


def layers(*rows, of=0):
    """In how many layers each token went to other experts."""
    return torch.full((N,), of).index_fill(0, torch.tensor(rows, dtype=torch.int64), of + 2)


FEW = list(range(0, N, 60))  # ten tokens, 1.7 %


@pytest.mark.parametrize("usual", [0, 5], ids=["a shallow mixture", "a deep one, that reroutes every token somewhere"])
def test_a_gap_on_rerouted_tokens_is_routing(usual, logits):
    diagnosis = mixture(logits, moved=FEW, rerouted=layers(*FEW, of=usual))
    assert (diagnosis.cause, diagnosis.is_sound) == ("routing", False)
    assert "1.7% of the tokens went to other experts" in diagnosis.detail
    assert diagnosis.left < diagnosis.gap  # the gap of the other tokens
    assert "R3" in WHAT_TO_DO[diagnosis.cause]


def test_without_the_samplers_routing_a_gap_on_few_tokens_of_a_mixture_is_routing(logits):
    diagnosis = mixture(logits, moved=FEW)
    assert diagnosis.cause == "routing"
    assert "did not return its routing" in diagnosis.detail


def test_the_same_gap_of_a_dense_model_is_not_routing(logits):
    own = logits.clone()
    own[FEW] += torch.randn(own[FEW].shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert found(logits, torch.log_softmax(own.bfloat16().double(), -1)).cause != "routing"


@pytest.mark.parametrize("rerouted", [None, layers(), layers(*FEW)], ids=["unknown", "none", "harmless"])
def test_a_mixture_whose_gap_is_rounding_on_all_tokens_is_not_routing(rerouted, logits):
    assert mixture(logits, moved=[], rerouted=rerouted).cause == "rounding"


def test_a_mixture_in_float32_agrees_even_where_a_router_was_undecided(logits):
    assert mixture(logits, moved=[], rounded=False, rerouted=layers(*FEW)).cause == "agreement"


@pytest.mark.parametrize("known", [True, False])
def test_stale_weights_of_a_mixture_are_not_routing(known, logits):
    """They reroute tokens too, but the others have a gap that rounding cannot make."""
    diagnosis = mixture(logits, moved=FEW, noise=0.3, rerouted=layers(*FEW) if known else None)
    assert diagnosis.cause == "weights"


def test_two_rerouted_tokens_are_too_few_to_judge_by(logits):
    assert mixture(logits, moved=FEW[:2], rerouted=layers(*FEW[:2])).cause == "rounding"


def test_routing_is_compared_as_sets_layer_by_layer():
    own = [torch.tensor([[0, 1], [2, 3], [0, 1]]), torch.tensor([[5, 4], [6, 7], [4, 5]])]
    theirs = torch.tensor([[1, 0, 4, 5], [2, 1, 7, 6], [2, 3, 6, 7]]).short().numpy()
    assert _rerouted(own, theirs).tolist() == [0, 1, 2]
    assert _rerouted(own, None) is None
    assert _rerouted(own, theirs[:, :2]) is None  # a model whose first layers are dense reports fewer routers
    assert _rerouted([], theirs) is None


def test_completions_are_read_one_after_the_other(logits):
    tokens = drawn(torch.softmax(logits, -1)).squeeze(-1)
    whole = of_logits(logits, tokens, 1.0)
    parts = joined([of_logits(logits[rows], tokens[rows], 1.0) for rows in (slice(0, 7), slice(7, N))])
    assert torch.equal(parts.as_set, whole.as_set)
    assert all(torch.equal(parts.otherwise[name], x) for name, x in whole.otherwise.items())


def test_the_report_names_the_worst_token_and_escapes_its_text(logits):
    tokens = drawn(torch.softmax(logits, -1)).squeeze(-1)[:6]
    readings = of_logits(logits[:6], tokens, 1.0)
    recorded = readings.as_set.clone()
    recorded[4] -= math.log(2)
    completions = [Completion([1, 2], tokens[:3].tolist(), []), Completion([3], tokens[3:].tolist(), [])]
    made = probe_report.report(
        completions, recorded, readings, diagnose(recorded, readings), lambda ids: f"\x1b[31m{ids}", worst=2
    )
    assert made.tokens == 6
    assert made.worst[0]["token"] == f"\x1b[31m[{int(tokens[4])}]"
    assert made.worst[0]["before"] == f"\x1b[31m{[3, int(tokens[3])]}"
    assert made.quantiles["π/μ"]["largest"] == pytest.approx(2.0)
    assert made.quantiles["log π − log μ"]["p50"] == 0
    said = probe_report.text(made)
    assert "\x1b" not in said
    assert "\\x1b[31m" in said
    assert json.loads(json.dumps(made.to_dict()))["verdict"]["gap"] == pytest.approx(math.log(2) / 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype must be"),
        ({"temperature": 0.0}, "Greedy decoding has no distribution"),
        ({"top_p": 1.5}, r"--top-p must be in \(0, 1\]"),
        ({"top_k": -1}, "--top-k must be"),
        ({"logprobs": "cooked"}, "--logprobs must be"),
        ({"length": 0}, "--length must be"),
    ],
)
def test_a_drawing_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(trustrl.errors.ConfigError, match=message):
        ProbeSampling(**settings)


def test_an_unknown_sampler_is_refused():
    with pytest.raises(trustrl.errors.ConfigError, match="--sampler must be"):
        sample_completions("sglang", "tiny", [[1]], ProbeSampling())


@pytest.mark.parametrize(
    ("drawing", "cause"),
    [
        pytest.param(ProbeSampling(dtype="float32", length=12), "agreement", id="nothing wrong"),
        pytest.param(ProbeSampling(dtype="float32", length=12, top_k=5), "truncation", id="top-k"),
        pytest.param(
            ProbeSampling(dtype="float32", length=12, temperature=0.7, logprobs="raw"), "raw log-probs", id="raw"
        ),
    ],
)
def test_a_real_network_with_a_fault_planted_in_its_sampler(drawing, cause, tmp_path):
    transformers = pytest.importorskip("transformers")
    from trustrl.tools.probe.trainer_logprobs import by_transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, initializer_range=0.5, bos_token_id=None,
        eos_token_id=79, pad_token_id=0,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    completions = sample_completions("transformers", str(tmp_path), [[3, 4, 5], [6, 7], [8, 9, 10, 11]], drawing)
    recorded = torch.tensor([x for one in completions for x in one.logp], dtype=torch.float64)
    diagnosis = diagnose(recorded, by_transformers(str(tmp_path), completions, drawing.temperature))
    assert diagnosis.cause == cause
