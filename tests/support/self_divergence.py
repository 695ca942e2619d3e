"""A policy compared with itself, in any engine: the largest divergence of each kind of region, and the bound on it.

An engine records the anchor with its own weights and runs one update on the same tokens before the weights move. Then
the divergence is 0, the ratio is 1, and no token is masked, in every precision. docs/reference/precision.md has the
bounds, u, w, V, D and Z. An engine's worker calls `cells`; `support.precision_layouts` lists the workers and runs
them.

Derivation of the bounds:

Top-K. The recording pass and the update sum the vocabulary in another order. A float32 sum of V positive terms has a
relative error of at most V·w, an exponential a few w, and three subtractions round numbers of size Z + log V; both
passes err, hence the 2. The second term is c cells, usually one: if the sampled token is among the K most probable
ids, the search finds one id too many. It is in the tail, and its logit in the update is summed in another order and
rounded to half precision. Its probability is at most that of the least probable listed id, and at most the tail. In
float32 u drops out. With tensor parallelism over R ranks each rank searches for K ids, and c is K (R − 1) + 1.

Other micro-batches. A matrix product may add its terms in another order if the number of rows changes. An inner
product of length m changes by at most 2 m·w relative to Σ|aᵢbᵢ|. To first order, and if layers do not amplify a
relative change of their input, n is the sum of these lengths over the products on the path, 674 here.

In half precision, another order of the sum can tip a number by one unit in its last place. To first order, r
roundings on the path, 33 here, add 2u·r·Z: 2 nats in fp16 and 15 in bf16 for this model, which bounds nothing.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import trustrl
from trustrl import regions

VOCABULARY, HIDDEN, LAYERS, PROMPT, K = 1000, 64, 2, 4, 20
LENGTHS = (29, 3, 11, 1, 17, 6)
"""Response tokens of each sequence of a rank."""

HEAD = 0.55
"""Standard deviation of the output layer's weights. The log-sum-exp of the logits is then about 15."""

TEMPERATURE = 0.8
LARGEST_LOGIT = 60.0
"""Bound on |logit|: √D times the largest row of the output layer, at the lower temperature. `tokens` checks it."""

KINDS = {
    "Binary TV": regions.DPPO(regions.BinaryTV(), anchor="proximal"),
    "Binary KL": regions.DPPO(regions.BinaryKL(), anchor="proximal"),
    "Top-K TV": regions.DPPO(regions.TopKTV(k=K), anchor="proximal"),
    "Top-K KL": regions.DPPO(regions.TopKKL(k=K), anchor="proximal"),
    "TROLL": trustrl.preset("troll", k=K),
    "exact TV": regions.DPPO(regions.FullTV(), anchor="proximal"),
    "exact KL": regions.DPPO(regions.FullKL(), anchor="proximal"),
    "PPO clip": regions.PPO(anchor="proximal"),
    "GSPO": trustrl.preset("gspo", anchor="proximal"),
    "both anchors": trustrl.preset("dppo-decoupled"),
}
PER_SEQUENCE = ("GSPO",)
"""The kinds that are defined for the mean over sequences."""

UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Unit roundoff: the largest relative error of rounding to nearest."""

FAULTS = ("arguments", "outputs")
"""Faults to put back: casts reach the request of a forward pass, or its results."""


class Tokens(NamedTuple):
    """One rank's sequences, padded on the right."""

    prompts: Tensor
    responses: Tensor
    in_loss: Tensor
    advantages: Tensor


def model_folder(folder: Path, *, experts: int = 0, **more: Any) -> str:
    """Saves the model that every engine loads, with a tokenizer. With experts, a token goes to two of them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    torch.manual_seed(0)
    if experts:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        shape |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, norm_topk_prob=True, decoder_sparse_step=1))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape | more))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(std=HEAD if name.startswith("lm_head") else 0.2)
    model.save_pretrained(folder)
    return str(folder)


@functools.cache
@torch.no_grad()
def tokens(folder: str, rank: int = 0) -> Tokens:
    """Responses that the model draws, with uneven lengths."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert HIDDEN**0.5 * model.lm_head.weight.norm(dim=-1).max() / TEMPERATURE <= LARGEST_LOGIT
    make = torch.Generator().manual_seed(20 + rank)
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), PROMPT), generator=make)
    for _ in range(max(LENGTHS)):
        probs = model(ids, use_cache=False).logits[:, -1].softmax(-1)
        probs[:, :3] = 0
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=make)], dim=1)
    in_loss = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    responses = torch.where(in_loss, ids[:, PROMPT:], 0)
    advantages = torch.randn(len(LENGTHS), 1, generator=make).expand(in_loss.shape).contiguous()
    return Tokens(ids[:, :PROMPT], responses, in_loss, advantages)


@contextmanager
def watched(module: Any) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Collects (LossOutput, PolicyTokens, RolloutTokens) of each call of an adapter's `policy_loss`."""
    seen, original = [], module.policy_loss

    def policy_loss(policy: Any, rollout: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((original(policy, rollout, *args, **kwargs), policy, rollout))
        return seen[-1][0]

    module.policy_loss = policy_loss
    try:
        yield seen
    finally:
        module.policy_loss = original


class _Transparent(NamedTuple):
    """A request that torch descends into, as it did before requests were opaque."""

    value: Any


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Puts one of `FAULTS` back, in every adapter that is loaded."""
    name, faulty = {"arguments": ("Opaque", _Transparent), "outputs": ("unrounded", lambda model: model)}[fault]
    modules = [x for key, x in sys.modules.items() if key.startswith("trustrl.engines") and hasattr(x, name)]
    originals = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, faulty)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, name, original)


class Measured(NamedTuple):
    """The largest differences of a policy from itself, over the tokens in the loss."""

    tv: float
    kl: float
    log_ratio: float
    """Largest |log π − log anchor|, and largest |log of the region's weight|."""

    masked: int
    tokens: int
    wide: bool
    """True if the log-probs that reach the loss have more digits than bf16 and fp16."""

    bound: float | None
    """Bound on TV and |log ratio|, and half of the bound on KL; None if we know none."""

    @property
    def within(self) -> bool | None:
        """True if the bound holds and nothing is masked; None without a bound."""
        if self.bound is None:
            return None
        return max(self.tv, self.kl / 2, self.log_ratio) <= self.bound and not self.masked


def measured(
    seen: list[tuple[Any, Any, Any]], precision: str, *, regrouped: bool = False, extra_cells: int = 1
) -> Measured:
    """Returns the largest differences over all micro-batches of an update.

    Args:
        seen: What `watched` collected.
        precision: The dtype of the products, a key of `UNITS`.
        regrouped: Whether the anchor was recorded in other micro-batches than the update's.
        extra_cells: Ids outside the top K whose logits only the recording pass computes in float32.
    """
    found = [_measured(*one, precision, extra_cells) for one in seen if one[2].in_loss.any()]
    if not regrouped:
        return merged(found)
    more = _regrouped() if precision == "fp32" else None  # without a bound in 16 bits
    return merged([one._replace(bound=None if more is None else one.bound + more) for one in found])


def merged(parts: list[Measured]) -> Measured:
    """Returns the differences over all parts: micro-batches or ranks."""
    tv, kl, log_ratio, masked, num, wide, bounds = zip(*parts, strict=True)
    bound = None if None in bounds else max(bounds)
    return Measured(max(tv), max(kl), max(log_ratio), sum(masked), sum(num), all(wide), bound)


def _measured(out: Any, policy: Any, rollout: Any, precision: str, extra_cells: int) -> Measured:
    on = rollout.in_loss
    logp, anchor = policy.logp.detach()[on], rollout.proximal_logp[on].double()
    weight = out.decision.weight[on].double()
    log_ratio = max((logp.double() - anchor).abs().max().item(), weight.log().abs().max().item())
    if policy.full_divergence is not None:
        tv, kl = policy.full_divergence.tv[on].double(), policy.full_divergence.kl[on].double()
    else:
        tv, kl = _over_cells(*_cells(policy, rollout, on))
    wide = not any(torch.equal(logp, logp.to(half).to(logp.dtype)) for half in (torch.bfloat16, torch.float16))
    bound = _reordered(policy, on, precision, extra_cells) if rollout.topk is not None else 0.0
    masked = int((~out.decision.keep[on]).sum())
    return Measured(tv.max().item(), kl.abs().max().item(), log_ratio, masked, int(on.sum()), wide, bound)


def _cells(policy: Any, rollout: Any, on: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probs of policy and anchor over the cells that the region knows, (N, cells)."""
    logp, anchor = policy.logp.detach()[on].double(), rollout.proximal_logp[on].double()
    if rollout.topk is None:
        return tuple(torch.stack([x, torch.log1p(-x.exp())], -1) for x in (logp, anchor))
    outside = ~(rollout.topk.ids[on] == rollout.token_ids[on].unsqueeze(-1)).any(-1)
    rows = []
    for sampled, top, tail in (
        (logp, policy.topk_logp.detach(), policy.tail_logp.detach()),
        (anchor, rollout.topk.logp, rollout.topk.tail_logp),
    ):
        own = torch.where(outside, sampled, -torch.inf)
        rows.append(torch.cat([top[on].double(), tail[on].double().unsqueeze(-1), own.unsqueeze(-1)], -1))
    return rows[0], rows[1]


def _over_cells(policy: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (TV, KL(anchor‖policy)) over cells."""
    gap = torch.where(policy == anchor, 0.0, anchor - policy)  # empty cells are −inf on both sides
    return (policy.exp() - anchor.exp()).abs().sum(-1) / 2, (anchor.exp() * gap).sum(-1)


def _reordered(policy: Any, on: Tensor, precision: str, extra_cells: int) -> float:
    """Bound for a top-K: another order of the sums, and the cells that only the recording pass computes in float32."""
    wide = UNITS["fp32"]
    sums = 2 * wide * (VOCABULARY + 8 + 3 * (LARGEST_LOGIT + math.log(VOCABULARY)))
    logit = (2 * HIDDEN * wide + (UNITS[precision] if precision != "fp32" else 0.0)) * LARGEST_LOGIT
    smallest, tail = (x.detach()[on].double().exp() for x in (policy.topk_logp.amin(-1), policy.tail_logp))
    return sums + math.expm1(logit) * torch.minimum(extra_cells * smallest, tail).max().item()


def _regrouped() -> float:
    """Bound in float32 for a recording pass in other micro-batches than the update's."""
    longest = PROMPT + max(LENGTHS)
    lengths = LAYERS * (HIDDEN + 16 + longest + HIDDEN + HIDDEN + 64) + HIDDEN  # q, k, v; scores; sums; o; up; down
    return 2 * UNITS["fp32"] * lengths * LARGEST_LOGIT


def cells(
    measure: Callable[[str], Measured | None], kinds: Iterable[str] = KINDS, **about: str
) -> list[dict[str, Any]]:
    """Measures kinds of regions, also with each fault put back.

    Args:
        measure: Returns the differences of one kind, or None if the engine refuses it.
        kinds: The kinds, all by default.
        **about: The engine, layout and precision.
    """
    rows = []
    for kind in kinds:
        found: dict[str, Measured | None] = {}
        for fault in (None, *FAULTS):
            with nullcontext() if fault is None else planted(fault):
                found[fault or "right"] = measure(kind)
        right = found.pop("right")
        if right is None:
            continue
        touched = {fault: x for fault, x in found.items() if x is not None and x != right}
        caught = {fault: _caught(right, x) for fault, x in touched.items()}
        planted_rows = {fault: {**x._asdict(), "caught": caught[fault]} for fault, x in touched.items()}
        rows.append({**about, "kind": kind, **right._asdict(), "within": right.within, "planted": planted_rows})
    return rows


def _caught(right: Measured, faulty: Measured) -> bool | None:
    """Returns whether a fault shows: in digits, or in a bound that no longer holds; None without a bound."""
    if right.wide and not faulty.wide:
        return True
    return None if faulty.within is None else not faulty.within


def check(rows: list[dict[str, Any]]) -> None:
    """Raises if a cell is outside its bound, or if a fault that touches a bounded cell is not caught there."""
    for row in rows:
        assert row["within"] is not False, row
        for fault, found in row["planted"].items():
            assert found["caught"] is not False, (fault, row)
