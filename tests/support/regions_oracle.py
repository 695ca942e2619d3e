"""What an engine must find: plain models, whole logits, all ranks' sequences in one batch.

The region's own mathematics is the library's (it has oracles of its own); everything an engine adds is done here in the
plainest way: no packing, no micro-batches, no ranks, no fused pass, no records that travel.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import trustrl
from trustrl import PolicyTokens, RolloutTokens, TopK, regions
from trustrl.core.records import FullDivergence

VOCABULARY, HIDDEN, PROMPT, RESPONSE, ROWS, K = 64, 32, 4, 12, 6, 8
GROWTH, TEMPERATURE = 1.06, 0.8


class Batch(NamedTuple):
    """One rank's sequences and all that was recorded of them; padded on the right."""

    prompts: Tensor
    responses: Tensor
    in_sequence: Tensor
    in_loss: Tensor
    advantages: Tensor
    behavior_logp: Tensor
    proximal_logp: Tensor
    reference_logp: Tensor
    behavior_top_ids: Tensor
    behavior_top_logp: Tensor
    kept: Tensor | None = None
    """(B, R, V): the ids that truncated sampling kept; None if it drew from the whole vocabulary."""


@dataclass(frozen=True)
class Case:
    region: Any
    mode: str = "token-mean"
    settings: dict[str, Any] = field(default_factory=dict)
    same_on_rank: int | None = None
    """A rank whose sampler happens to have the trainer's very log-probs."""

    truncated: bool = False
    """True if tokens were drawn from a part of the vocabulary."""


def _tight(divergence, anchor="behavior", **settings):
    edge = 0.002 if divergence is regions.BinaryTV else 0.02  # random tokens are rare ones, which hardly move
    return regions.DPPO(divergence(max_increase=edge, max_decrease=edge / 2, **settings), anchor=anchor)


PENALTIES = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "entropy_coeff": 0.2}
CASES = {
    "binary on μ": Case(_tight(regions.BinaryTV)),
    "binary on μ, bypassed": Case(_tight(regions.BinaryTV), settings={"bypass": True}),
    "binary on π'": Case(_tight(regions.BinaryTV, anchor="proximal")),
    "binary on π', bypassed": Case(_tight(regions.BinaryTV, anchor="proximal"), settings={"bypass": True}),
    "top-K on μ": Case(_tight(regions.TopKTV, k=K)),
    "top-K on μ, mean of sequences": Case(_tight(regions.TopKTV, k=K), mode="seq-mean-token-mean"),
    "top-K on π'": Case(_tight(regions.TopKTV, anchor="proximal", k=K)),
    "top-K KL on μ": Case(_tight(regions.TopKKL, k=K)),
    "top-K with penalties": Case(_tight(regions.TopKTV, k=K), settings=PENALTIES | {"calculate_entropy": True}),
    "TROLL on π'": Case(trustrl.preset("troll", k=K, bound=0.01)),
    "TROLL on μ": Case(trustrl.preset("troll", k=K, bound=0.01, anchor="behavior")),
    "exact TV on π'": Case(_tight(regions.FullTV, anchor="proximal")),
    "both anchors": Case(trustrl.preset("minirl")),
    "both anchors, one rank's the same": Case(trustrl.preset("minirl"), same_on_rank=1),
    "both anchors, bypassed": Case(trustrl.preset("minirl"), settings={"bypass": True}),
}
TRUNCATED = {
    "binary on μ, truncated": Case(_tight(regions.BinaryTV), truncated=True),
    "top-K on μ, truncated": Case(_tight(regions.TopKTV, k=K), truncated=True),
    "TROLL on π', truncated": Case(trustrl.preset("troll", k=K, bound=0.01), truncated=True),
    "both anchors, truncated": Case(trustrl.preset("minirl"), truncated=True),
}
"""Cases for engines that renormalize the policy over the sampler's kept ids."""

LOOSE = {
    "sampled": Case(regions.DPPO(regions.BinaryTV(max_increase=1.0, max_decrease=1.0))),
    "top-K": Case(regions.DPPO(regions.TopKTV(k=K, max_increase=1.0, max_decrease=1.0))),
    "top-K on π'": Case(regions.DPPO(regions.TopKTV(k=K, max_increase=1.0, max_decrease=1.0), anchor="proximal")),
}
"""Bounds that no token leaves: verl's own forward pass and ours must give one gradient (on μ; π' is another anchor)."""


def tiny_model(folder: Path, **more: Any) -> str:
    """Random weights, the same with every version of transformers; log-probs as different as a trained model's."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    model = Qwen3ForCausalLM(Qwen3Config(**shape | more))
    fill(model)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def fill(model: Any) -> None:
    make = torch.Generator().manual_seed(0)
    for _, p in sorted(model.named_parameters()):
        p.copy_(0.2 * torch.randn(p.shape, generator=make) if p.ndim > 1 else torch.ones(p.shape))


def model_of(folder: str, growth: float = 1.0) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(growth)
    return model


def distribution(model: Any, prompts: Tensor, responses: Tensor) -> Tensor:
    """(B, R, V) log-probs at the sampling temperature."""
    logits = model(torch.cat([prompts, responses], dim=1)).logits[:, PROMPT - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


@torch.no_grad()
def batch(folder: str, rank: int, case: Case = CASES["binary on μ"]) -> Batch:
    """Each rank's own; the first micro-batch of rank 0 has no token in the loss, and one answer of a tool."""
    make = torch.Generator().manual_seed(10 + rank)
    prompts = torch.randint(3, VOCABULARY, (ROWS, PROMPT), generator=make)
    responses = torch.randint(3, VOCABULARY, (ROWS, RESPONSE), generator=make)
    lengths = torch.randint(3, RESPONSE + 1, (ROWS,), generator=make)
    in_sequence = torch.arange(RESPONSE) < lengths.unsqueeze(1)
    in_loss = in_sequence.clone()
    if rank == 0:
        in_loss[:2] = False
    in_loss[3, 1] = False
    policy = distribution(model_of(folder), prompts, responses)
    sampler = (policy + 0.3 * torch.randn(policy.shape, generator=make)).log_softmax(-1)
    kept = None
    if case.truncated:  # from K + 1 to 3 K ids: each row keeps another number
        count = K + 1 + torch.randint(0, 2 * K, (ROWS, RESPONSE, 1), generator=make)
        kept = sampler.argsort(-1, descending=True).argsort(-1) < count
        kept.scatter_(-1, responses.unsqueeze(-1), True)
        sampler, policy = inside(sampler, kept), inside(policy, kept)
    top = sampler.topk(K, -1)

    def at_token(logp):
        return logp.gather(-1, responses.unsqueeze(-1)).squeeze(-1)

    return Batch(
        prompts, responses, in_sequence, in_loss, torch.randn(ROWS, 1, generator=make).expand(ROWS, RESPONSE),
        at_token(policy if case.same_on_rank == rank else sampler), at_token(policy), at_token(policy) + 0.2 * torch.randn(ROWS, RESPONSE, generator=make),
        top.indices, top.values, kept,
    )  # fmt: skip


def inside(logp: Tensor, kept: Tensor | None) -> Tensor:
    """Log-probs renormalized over the kept ids."""
    return logp if kept is None else logp.masked_fill(~kept, -torch.inf).log_softmax(-1)


def support(logp: Tensor, ids: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs at the ids, log of the mass outside them and the sampled token)."""
    outside = torch.ones_like(logp, dtype=torch.bool)
    outside.scatter_(-1, ids, False).scatter_(-1, token_ids.unsqueeze(-1), False)
    return logp.gather(-1, ids), logp.masked_fill(~outside, -torch.inf).logsumexp(-1)


class Found(NamedTuple):
    """What an engine is compared with."""

    gradient: Tensor
    """By all parameters, of the whole batch's loss."""

    metrics: dict[str, float]
    keep: list[bool]
    """The verdict on each token in the loss, one sequence after another."""

    weight: list[float]
    topk: TopK | None
    by_name: dict[str, Tensor]
    """The gradient by each parameter."""
    loss: float


def expected(folder: str, ranks: int, case: Case) -> Found:
    """One update's gradient and verdicts, with the policy moved."""
    parts = [batch(folder, rank, case) for rank in range(ranks)]
    columns = zip(*parts, strict=True)
    all_ranks = Batch(*(None if column[0] is None else torch.cat(column) for column in columns))
    model = model_of(folder, GROWTH)
    whole = distribution(model, all_ranks.prompts, all_ranks.responses)
    logp = inside(whole, all_ranks.kept)
    with torch.no_grad():
        before = inside(distribution(model_of(folder), all_ranks.prompts, all_ranks.responses), all_ranks.kept)
    tokens, needs = all_ranks.responses, case.region.needs()
    policy: dict[str, Any] = {"logp": logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)}
    rollout: dict[str, Any] = {}
    if needs.topk:
        if needs.anchor == "behavior":
            ids, values, tail = all_ranks.behavior_top_ids, all_ranks.behavior_top_logp, None
        else:
            ids = before.topk(needs.topk, -1).indices
            values, tail = support(before, ids, tokens)
        rollout["topk"] = TopK(ids, values, of=needs.anchor, tail_logp=tail)
        policy["topk_logp"], policy["tail_logp"] = support(logp, ids, tokens)
    if needs.fills:
        own = logp.detach().topk(needs.topk, -1).indices
        policy["topk"] = TopK(own, logp.gather(-1, own), of=needs.anchor)
    if needs.full:
        tv = 0.5 * (logp.detach().exp() - before.exp()).abs().sum(-1)
        kl = (before.exp() * (before - logp.detach())).sum(-1)
        policy["full_divergence"] = FullDivergence(tv=tv, kl=kl, of=needs.anchor)
    reduction = (
        trustrl.TokenMean(num_tokens=int(all_ranks.in_loss.sum()))
        if case.mode == "token-mean"
        else trustrl.SequenceMeanTokenMean(num_sequences=len(tokens))
    )
    out = trustrl.policy_loss(
        PolicyTokens(**policy, entropy=-(whole.exp() * whole).sum(-1).detach()),
        RolloutTokens(
            advantage=all_ranks.advantages, in_loss=all_ranks.in_loss, token_ids=tokens,
            behavior_logp=all_ranks.behavior_logp, proximal_logp=all_ranks.proximal_logp, **rollout,
        ),
        case.region, reduction=reduction,
    )  # fmt: skip
    loss = out.loss
    if case.settings.get("use_kl_loss"):
        on = all_ranks.in_loss.float() / all_ranks.in_loss.sum()
        gap = all_ranks.reference_logp - policy["logp"]
        entropy = -(logp.exp() * logp).sum(-1)
        loss = loss + 0.3 * (on * (gap.exp() - 1 - gap)).sum() - 0.2 * (on * entropy).sum()
    loss.backward()
    by_name = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    gradient = torch.cat([x.flatten() for x in by_name.values()])
    on = all_ranks.in_loss
    verdicts = out.decision.keep[on].tolist(), out.decision.weight[on].tolist()
    return Found(gradient, trustrl.rates(out.sums), *verdicts, rollout.get("topk"), by_name, loss.item())


AGREED = Path(__file__).with_name("agreed_decisions.json")
"""Verdicts on one batch that every engine must reach, in whatever environment it lives."""

AGREEING = [
    name
    for name, case in CASES.items()
    if not case.settings and case.mode == "token-mean" and case.same_on_rank is None
]


def check_agreement(name: str, keep: list[bool], weight: list[float]) -> None:
    """Compares an engine's verdicts on rank 0's batch with the agreed ones."""
    agreed = json.loads(AGREED.read_text())[name]
    assert "".join("01"[kept] for kept in keep) == agreed["keep"], name
    assert weight == pytest.approx(agreed["weight"], rel=1e-4), name


def write_agreement(folder: Path) -> None:
    """Makes the file anew: `python -c "from support import regions_oracle; ..."` after a change to the cases."""
    model = tiny_model(folder)
    found = {name: expected(model, 1, CASES[name]) for name in AGREEING}
    content = {
        name: {"keep": "".join("01"[kept] for kept in one.keep), "weight": [round(w, 6) for w in one.weight]}
        for name, one in found.items()
    }
    AGREED.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
