"""bf16 log-probs on a real model: SmolLM2-135M's hidden states, on prose and on its own samples. `nox -s real_model`."""

import pytest
import torch

pytest.importorskip("gguf", reason="needs benchmarks/smollm2-requirements.txt; run by `nox -s real_model`")

import accuracy
import smollm2

import trustrl
from trustrl.core.token_logprobs import AnchorStates

SMALLEST_THRESHOLD = 0.05  # TROLL's ε and the binary KL's δ, the smallest in use


@pytest.fixture(scope="module")
def data():
    return smollm2.load()


@pytest.fixture(scope="module", params=["text", "samples"])
def corpus(request, data):
    """(name, errors, bounds and tail masses for each K)."""
    return request.param, accuracy.errors(data, request.param)


def test_the_returned_bound_holds_at_every_token(corpus):
    for k, (error, bound, _) in corpus[1].items():
        assert (error <= bound).all(), f"K = {k}"
        assert 0 < bound.mean() < 0.1, f"K = {k}: a bound of nothing or of anything would hold too"


def test_repair_brings_the_error_far_below_the_smallest_threshold(corpus, data):
    found = corpus[1]
    assert found[64][0].max() < SMALLEST_THRESHOLD / 10
    assert found[256][0].max() < found[16][0].max() < found[0][0].max() / 5


def test_without_repair_the_error_is_of_a_thresholds_size(corpus, data):
    """The control: what every bf16 path does."""
    hidden, head, token, _ = accuracy.rows(data, corpus[0])
    truth = torch.log_softmax(hidden.double() @ head.double().T, -1).gather(-1, token[:, None])[:, 0]
    plain = torch.log_softmax((hidden @ head.T).float(), -1).gather(-1, token[:, None])[:, 0]
    assert (plain.double() - truth).abs().max() > SMALLEST_THRESHOLD


def test_exact_divergences_of_two_real_policies(corpus, data):
    """Against float64, and a policy does not diverge from itself."""
    name, _ = corpus
    hidden, head, token, _ = accuracy.rows(data, name)
    moved = AnchorStates(data[f"{name}_moved_hidden"].bfloat16(), data["moved_head"].bfloat16())
    policy, anchor = (
        torch.log_softmax(h.double() @ w.double().T, -1) for h, w in ((hidden, head), (moved.hidden, moved.head))
    )
    tv = (policy.exp() - anchor.exp()).abs().sum(-1) / 2
    kl = (anchor.exp() * (anchor - policy)).sum(-1)
    ids = anchor.topk(64, -1).indices
    got = trustrl.token_logprobs(hidden, head, token, gather_ids=ids, against=moved)
    assert (got.tv.double() - tv).abs().max() < 2e-3
    assert (got.kl.double() - kl).abs().max() < 2e-3
    same = trustrl.token_logprobs(hidden, head, token, against=AnchorStates(hidden, head))
    assert float(same.tv.max()) == 0


@pytest.mark.parametrize(("dtype", "largest"), [(torch.bfloat16, 1e-2), (torch.float32, 5e-6)])
def test_kept_products_have_the_gradients_of_products_made_again(data, corpus, dtype, largest):
    """Against float64: both stay within the rounding of their dtype, and keeping adds nothing to it."""
    kept, again = (accuracy.gradient_errors(data, corpus[0], dtype, kept=one) for one in (True, False))
    assert all(0 < one < largest for one in (*kept, *again))
    assert all(a <= 1.05 * b for a, b in zip(kept, again, strict=True))
