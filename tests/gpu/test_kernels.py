"""Triton kernels against plain code on the same device; under Triton's interpreter where there is no GPU.

The limits come from the rounding of the products; see `support.product_rounding`. Triton rounds none of them, so what
remains are the float32 sums.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import trustrl
from core.test_triton_steps import must_agree, records
from support import troll_oracle
from support.devices import DEVICE, ON_GPU
from support.worlds import gradient, mapped, reduction_for
from trustrl import regions
from trustrl.core.token_logprobs import AnchorStates

pytestmark = [
    pytest.mark.skipif(not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="run by tests/gpu/run.py"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]

N, D, V, K, TEMPERATURE = 24, 32, 200, 8, 0.8


def drawn(dtype, spread=1.0):
    """Hidden states of the policy and of its anchor, an output layer, and sampled ids."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g)
    other = hidden + 0.1 * torch.randn(N, D, generator=g)
    head = spread * torch.randn(V, D, generator=g) / 2
    token_ids = torch.multinomial((other @ head.T / TEMPERATURE).softmax(-1), 1, generator=g).squeeze(-1)
    return *(x.to(DEVICE, dtype) for x in (hidden, other, head)), token_ids.to(DEVICE)


def exact_logp(hidden, head):
    """Every log-prob in float64."""
    return (hidden.double() @ head.double().T / TEMPERATURE).log_softmax(-1)


def limit(hidden, head):
    """What float32 sums of D products may move a log-prob by: twice √D units of the largest logit."""
    largest = (hidden.double() @ head.double().T / TEMPERATURE).abs().amax(-1)
    return 2 * D**0.5 * torch.finfo(torch.float32).eps * largest + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_vocabulary_pass_is_the_softmax_of_float64_products(dtype):
    hidden, other, head, token_ids = drawn(dtype)
    logp, anchor = exact_logp(hidden, head), exact_logp(other, head)
    ids = anchor.topk(K, -1).indices
    out = trustrl.token_logprobs(
        hidden, head, token_ids, gather_ids=ids, top_k=K, temperature=TEMPERATURE, impl="triton",
        against=AnchorStates(other, head),
    )  # fmt: skip
    allowed = limit(hidden, head)
    assert ((out.logp - logp.gather(-1, token_ids[:, None])[:, 0]).abs() <= allowed).all()
    assert ((out.gathered_logp - logp.gather(-1, ids)).abs() <= allowed[:, None]).all()
    assert ((out.topk.logp - logp.topk(K, -1).values).abs() <= allowed[:, None]).all()
    grown = 2 * torch.expm1(torch.maximum(allowed, limit(other, head)))
    assert ((out.tv - (logp.exp() - anchor.exp()).abs().sum(-1) / 2).abs() <= grown).all()
    assert ((out.kl - (anchor.exp() * (anchor - logp)).sum(-1)).abs() <= 2 * grown).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", trustrl.presets())
def test_every_presets_loss_is_the_eager_one(name, dtype):
    region, found = trustrl.preset(name), []
    for impl in ("eager", "triton"):
        policy, rollout, w = records(region, 3, dtype, faulty=False)
        policy, rollout = (mapped(x, _on_device) for x in (policy, rollout))
        out = trustrl.policy_loss(policy, rollout, region, reduction=reduction_for(region, w), impl=impl)
        out.sums  # noqa: B018  made on first access
        out.loss.backward()
        found.append((out, gradient(policy)))
    must_agree(*found)


def _on_device(x):
    return x.detach().to(DEVICE).requires_grad_(x.requires_grad)


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("rest", ["published", "fill"])
def test_trolls_selections_have_the_weights_of_their_definition_in_bf16(rest, impl):
    """From bf16 states to the weight. Inside the ball it is π̂(a)/b̂(a): four log-probs, each off by at most the limit."""
    hidden, other, head, token_ids = drawn(torch.bfloat16, spread=0.5)
    region = regions.TROLL(k=K, rest=rest, bound=20.0)
    anchor = trustrl.token_logprobs(other, head, token_ids, top_k=K, temperature=TEMPERATURE, impl="triton")
    policy = trustrl.token_logprobs(
        hidden, head, token_ids, gather_ids=anchor.topk.ids, top_k=K, temperature=TEMPERATURE, impl="triton"
    )
    rollout = trustrl.RolloutTokens(
        proximal_logp=anchor.logp[None], advantage=torch.ones(1, N, device=DEVICE), token_ids=token_ids[None],
        in_loss=torch.ones(1, N, dtype=torch.bool, device=DEVICE),
        topk=trustrl.TopK(anchor.topk.ids[None], anchor.topk.logp[None], "proximal", anchor.topk.tail_logp[None]),
    )  # fmt: skip
    tokens = trustrl.PolicyTokens(
        logp=policy.logp[None], topk_logp=policy.gathered_logp[None], tail_logp=policy.tail_logp[None],
        topk=trustrl.TopK(policy.topk.ids[None], policy.topk.logp[None]),
    )  # fmt: skip
    out = trustrl.policy_loss(tokens, rollout, region, reduction=trustrl.TokenSum(), impl=impl)
    select = troll_oracle.published_cells if rest == "published" else troll_oracle.filled_cells
    allowed = torch.expm1(4 * torch.maximum(limit(hidden, head), limit(other, head)))
    both = zip(exact_logp(hidden, head).tolist(), exact_logp(other, head).tolist(), strict=True)
    for row, (log_p, log_b) in enumerate(both):
        cells = select(log_p, log_b, int(token_ids[row]), K, region.tail_mass)
        wanted = troll_oracle.troll_weight(cells, log_p, region.bound)
        assert out.decision.weight[0, row].item() == pytest.approx(wanted, rel=allowed[row].item()), row
