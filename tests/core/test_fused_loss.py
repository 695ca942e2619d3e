"""`policy_loss_from_hidden`: the loss, sums and gradients of `token_logprobs` and `policy_loss`, in three products."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import trustrl
from trustrl import regions
from trustrl.config.terms import EntropyBonus, KLPenalty, SequenceMeanTokenMean, TokenMean, TokenWeights
from trustrl.core.fused_loss import PolicyHead, policy_loss_from_hidden
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.core.token_logprobs import token_logprobs
from trustrl.errors import ConfigError, MissingDataError, NonFiniteError, RecordError

N, D, V, K = 22, 8, 47, 5  # blocks of eight, eight and six tokens
TOKEN_WISE = [
    name
    for name in trustrl.presets()
    if not ((needs := trustrl.preset(name).needs()).sequences or needs.whole_call or needs.full or needs.reduction)
]
WHOLE_CALL = [name for name in trustrl.presets() if trustrl.preset(name).needs().whole_call]
CASES = {
    "binary": regions.DPPO(),
    "top-k": regions.DPPO(regions.TopKTV(k=K, max_increase=0.05)),
    "troll": regions.TROLL(k=K),
    "troll, own ids filled in": regions.TROLL(k=K, rest="fill"),
    "ppo": regions.PPO(),
}
MEAN = TokenMean(num_tokens=30)


def world(dtype=torch.float64, rows=N):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (rows, V))
    token = torch.randint(0, V, (rows,), generator=g)
    moved = hidden + 0.2 * torch.randn(rows, D, generator=g, dtype=torch.float64)
    anchor = torch.log_softmax(moved @ weight.T, -1)
    sampled = anchor.gather(-1, token[:, None]).squeeze(-1)
    in_loss = torch.arange(rows) % 7 != 3
    rollout = RolloutTokens(
        token_ids=token, behavior_logp=sampled, proximal_logp=sampled + 0.05, reference_logp=sampled - 0.1,
        advantage=torch.randn(rows, generator=g, dtype=torch.float64), in_loss=in_loss,
    )  # fmt: skip
    bias = 0.1 * torch.randn(V, generator=g, dtype=torch.float64)
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), rollout, anchor


def with_columns(rollout, anchor, region):
    """Returns the rollout with the columns that the region reads."""
    needs = region.needs()
    top = anchor.topk(min(needs.topk, V), -1)
    return replace(rollout, topk=TopK(top.indices, top.values, of=needs.anchor)) if needs.topk else rollout


def two_calls(hidden, head, rollout, region, **settings):
    """The definition: log-probs of all tokens, then the loss."""
    needs = region.needs()
    bonus = any(isinstance(penalty, EntropyBonus) for penalty in settings.get("penalties", ()))
    out = token_logprobs(
        hidden, head.weight, torch.where(rollout.in_loss, rollout.token_ids, -1), bias=head.bias,
        gather_ids=rollout.topk.ids if needs.topk else None, top_k=needs.topk if needs.fills else 0,
        softcap=head.softcap, temperature=head.temperature, entropy=True if bonus else "detached",
    )  # fmt: skip
    policy = PolicyTokens(
        logp=out.logp, topk_logp=out.gathered_logp, tail_logp=out.tail_logp, entropy=out.entropy,
        topk=None if out.topk is None else TopK(out.topk.ids, out.topk.logp, of=needs.anchor),
    )  # fmt: skip
    return trustrl.policy_loss(policy, rollout, region, **settings)


def same(got, want, tolerance):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compare(region, tolerance=1e-12, dtype=torch.float64, upstream=1.0, trained=(True, True, True), **settings):
    *leaves, rollout, anchor = world(dtype)
    for leaf, wanted in zip(leaves, trained, strict=True):
        leaf.requires_grad_(wanted)
    head = PolicyHead(leaves[1], leaves[2], softcap=9.0, temperature=0.8)
    rollout, settings = with_columns(rollout, anchor, region), {"reduction": MEAN, **settings}
    want, got = (call(leaves[0], head, rollout, region, **settings) for call in (two_calls, policy_loss_from_hidden))
    same([got.loss, *got.terms.values()], [want.loss, *want.terms.values()], tolerance)
    same(list(got.sums.flat()), list(want.sums.flat()), tolerance)
    assert torch.equal(got.decision.keep, want.decision.keep)
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    (upstream * want.loss).backward()
    expected = [leaf.grad.clone() for leaf in leaves]
    gradients = torch.autograd.grad(upstream * got.loss, leaves)
    for one, other in zip(gradients, expected, strict=True):
        assert other.abs().max() > 0
        same(one, other, tolerance * float(other.abs().max().clamp(min=1)))


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_each_token_wise_preset_gives_the_loss_sums_and_gradients_of_the_two_calls(name):
    compare(trustrl.preset(name))


@pytest.mark.parametrize("region", CASES.values(), ids=CASES)
def test_upstream_gradients_penalties_weights_and_frozen_parts(region):
    compare(region, upstream=3.7)
    compare(region, penalties=(KLPenalty(coefficient=0.1), EntropyBonus(coefficient=0.2)))
    compare(region, reduction=TokenWeights(torch.linspace(0, 1, N, dtype=torch.float64)))
    compare(region, trained=(True, False, False))
    compare(region, trained=(False, True, False))
    compare(region, trained=(True, False, True))
    compare(region, tolerance=2e-6, dtype=torch.float32)


@pytest.mark.parametrize("region", CASES.values(), ids=CASES)
def test_gradcheck(region):
    hidden, weight, bias, rollout, anchor = world(rows=11)
    # Small steps keep every decision, and inside one decision the loss is −M·w·A·log π with a constant coefficient. The
    # gradient of that is what the two calls compute, which the other tests compare; this one differentiates numbers.
    fields = with_columns(rollout, anchor, region)
    first = policy_loss_from_hidden(hidden, PolicyHead(weight, bias), fields, region, reduction=MEAN)
    if first.decision.weight is None or region.kind == "troll":
        pytest.skip("its value is not the integral of its gradient")
    frozen = (first.decision.weight * first.decision.keep * fields.advantage * fields.in_loss).detach() / 30

    def value(hidden, weight, bias):
        out = token_logprobs(hidden, weight, fields.token_ids, bias=bias, impl="reference")
        return -(frozen * out.logp).sum()

    want = torch.autograd.grad(value(hidden, weight, bias), (hidden, weight, bias))
    same(list(torch.autograd.grad(first.loss, (hidden, weight, bias))), list(want), 1e-12)
    assert torch.autograd.gradcheck(value, (hidden, weight, bias))


def step(leaves, rollout, region=CASES["binary"], scale=1.0):
    loss = policy_loss_from_hidden(leaves[0], PolicyHead(*leaves[1:]), rollout, region, reduction=MEAN).loss
    return scale * loss


def test_micro_batches_add_up():
    *leaves, rollout, _ = world()
    whole = torch.autograd.grad(step(leaves, rollout), leaves)
    for rows in (slice(0, 9), slice(9, N)):
        part = replace(rollout, **{name: getattr(rollout, name)[rows] for name in (
            "token_ids", "behavior_logp", "proximal_logp", "reference_logp", "advantage", "in_loss")})  # fmt: skip
        step([leaves[0][rows], *leaves[1:]], part).backward()
    same([x.grad for x in leaves], list(whole), 1e-12)


def test_a_loss_scale_is_applied_and_removed():
    *leaves, rollout, _ = world(torch.float32)
    plain = torch.autograd.grad(step(leaves, rollout), leaves)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(leaves, lr=0.1)
    scaler.scale(step(leaves, rollout)).backward()
    same([x.grad / 2**16 for x in leaves], list(plain), 1e-6)
    scaler.unscale_(optimizer)
    same([x.grad for x in leaves], list(plain), 1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    *leaves, rollout, _ = world()
    plain = torch.autograd.grad(step(leaves, rollout), leaves)

    def states_and_loss(first, *others):
        return step([torch.tanh(first), *others], rollout)

    by_hand = torch.autograd.grad(states_and_loss(*leaves), leaves)
    checkpoint(states_and_loss, *leaves, use_reentrant=reentrant).backward()
    same([x.grad for x in leaves], list(by_hand), 1e-12)
    assert not torch.equal(by_hand[0], plain[0])


def test_a_second_backward_pass_gives_the_same_gradients():
    *leaves, rollout, _ = world()
    loss = step(leaves, rollout)
    first = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    copies = [x.clone() for x in first]
    second = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, first, copies))
    same([2 * x for x in second], list(first), 1e-12)
    (gradient,) = torch.autograd.grad(step(leaves, rollout), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="must not be differentiated again"):
        gradient.sum().backward()


@pytest.mark.parametrize("region", [trustrl.preset("pg-is"), *CASES.values()], ids=["no bound", *CASES])
def test_three_products_at_any_number_of_tokens(region):
    for rows in (D, 4 * D, 16 * D):
        *leaves, rollout, anchor = world(torch.float32, rows)
        rollout = with_columns(replace(rollout, in_loss=torch.ones(rows, dtype=torch.bool)), anchor, region)
        with FlopCounterMode(display=False) as mode:
            step(leaves, rollout, region, scale=3.0).backward()
        products = mode.get_total_flops() / (2 * rows * V * D)
        # The backward products leave out masked tokens.
        assert products == pytest.approx(3.0) if region.kind == "pg-is" else 1 < products < 3.001


def test_low_precision_parts_are_summed_in_float32():
    *exact, rollout, _ = world(rows=16 * D)
    truth = torch.autograd.grad(step(exact, rollout), exact)
    leaves = [x.detach().bfloat16().requires_grad_() for x in exact]
    got = torch.autograd.grad(step(leaves, rollout), leaves)
    want = torch.autograd.grad(
        two_calls(leaves[0], PolicyHead(*leaves[1:]), rollout, CASES["binary"], reduction=MEAN).loss, leaves
    )
    for one, other, true in zip(got, want, truth, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - true).abs().max() <= 1.1 * (other - true).abs().max()


def test_without_a_gradient_and_without_tokens_in_the_loss():
    *leaves, rollout, _ = world()
    with torch.no_grad():
        assert not step(leaves, rollout).requires_grad
    masked = replace(rollout, in_loss=rollout.in_loss & (torch.arange(N) >= D))  # the first block has none
    gradients = torch.autograd.grad(step(leaves, masked), leaves)
    assert (gradients[0][:D] == 0).all()
    assert gradients[1].abs().max() > 0


def test_faults_are_counted_and_raised_as_by_policy_loss():
    *leaves, rollout, _ = world()
    rollout = replace(rollout, behavior_logp=rollout.behavior_logp.index_fill(0, torch.tensor([12]), torch.nan))
    head = PolicyHead(*leaves[1:])
    with pytest.raises(NonFiniteError):
        policy_loss_from_hidden(leaves[0], head, rollout, regions.DPPO(), reduction=MEAN, on_nonfinite="raise")
    out, want = (
        call(leaves[0], head, rollout, regions.DPPO(), reduction=MEAN) for call in (policy_loss_from_hidden, two_calls)
    )
    same(list(out.sums.flat()), list(want.sums.flat()), 1e-12)


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ConfigError, "needs whole sequences", {"region": trustrl.preset("gspo"), "reduction": SequenceMeanTokenMean(num_sequences=2)}),
        (ConfigError, "needs whole sequences", {"reduction": SequenceMeanTokenMean(num_sequences=2)}),
        *((ConfigError, "needs all tokens", {"region": trustrl.preset(name)}) for name in WHOLE_CALL),
        (ConfigError, "whole distributions", {"region": trustrl.preset("dppo-full-tv")}),
        (MissingDataError, "token_ids", {"token_ids": None}),
        (ConfigError, "kept_ids", {"kept_ids": torch.zeros(N, 2, dtype=torch.long)}),
        (RecordError, "packed", {"hidden": torch.zeros(3, D)}),
        (ConfigError, "float16", {"hidden": torch.zeros(N, D, dtype=torch.float16)}),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_split_raise(error, words, change):
    hidden, weight, bias, rollout, _ = world()
    region, reduction = change.pop("region", regions.DPPO()), change.pop("reduction", MEAN)
    hidden = change.pop("hidden", hidden)
    with pytest.raises(error, match=words):
        policy_loss_from_hidden(
            hidden, PolicyHead(weight, bias), replace(rollout, **change), region, reduction=reduction
        )
