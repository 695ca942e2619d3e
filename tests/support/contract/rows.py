"""The contract, row by row. Each row drives a running sampler and returns a figure with its limit."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from support.contract.driver import Cannot
from support.contract.truth import distribution, logits_of
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.replica_watch import ReplicaWatch
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.common.step_check import check_first_loss
from trustrl.errors import EngineError

EXACT = 1e-4
"""Largest difference in nats between a float32 sampler and a float32 forward pass."""

LENGTH = 24
ROWS = {}


@dataclass
class Row:
    figure: float
    limit: float = EXACT
    unit: str = "nats"
    note: str = ""

    @property
    def passed(self):
        return self.figure <= self.limit


def row(name, *, engine="main"):
    def registered(function):
        ROWS[name] = (engine, function)
        return function

    return registered


class Case:
    """One engine with two sets of weights, `first` and `second`, and prompts."""

    def __init__(self, driver, first, second, vocabulary):
        self.driver, self.first, self.second, self.vocabulary = driver, first, second, vocabulary
        self.loaded, self.number = first, 1
        draw = np.random.default_rng(0)
        self.prompts = [draw.integers(5, vocabulary, n).tolist() for n in (4, 9, 17, 33)]
        self.long = draw.integers(5, vocabulary, 300).tolist()

    def load(self, folder):
        if self.loaded != folder:
            self.number += 1
            self.driver.update(folder, self.number)
            self.loaded = folder


def parameters(**settings):
    return {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, "seed": 3, **settings}


def compared(case, prompt, record, asked, k=0, folder=None):
    """Largest |log μ − truth| at the sampled ids and at the top K; `inf` if an id is wrong."""
    if len(record) == 0:
        return math.inf
    logits = logits_of(folder or case.loaded, prompt, record.tokens.tolist())
    truth, unclear = distribution(logits, asked, case.driver.order)
    if record.kept is not None:
        kept = torch.zeros_like(unclear)
        for t, ids in enumerate(record.kept.rows()):
            kept[t, torch.tensor(ids).long()] = True
        if ((kept != truth.isfinite()) & ~unclear).any():
            return math.inf
        # The ids at the edge are the sampler's choice: μ is normalized over those that it kept.
        tempered = logits / asked.get("temperature", 1.0)
        truth = torch.log_softmax(tempered.masked_fill(~kept, -torch.inf), -1)
    tokens = torch.from_numpy(record.tokens).long().unsqueeze(-1)
    gap = (torch.from_numpy(record.logp) - truth.gather(-1, tokens)[:, 0]).abs()
    worst = gap.max().item() if gap.isfinite().all() else math.inf
    return max(worst, top_k_gap(record, truth, k)) if k else worst


def top_k_gap(record, truth, k):
    """Two ids whose probabilities differ by less than rounding may trade places: their log-probs are compared."""
    ids, logp = torch.from_numpy(record.topk_ids).long(), torch.from_numpy(record.topk_logp).double()
    if ids.shape != (len(truth), k) or any(len(set(row)) < k for row in record.topk_ids.tolist() if min(row) >= 0):
        return math.inf
    best = truth.topk(k).values
    if not torch.equal(logp.isfinite(), best.isfinite()):
        return math.inf
    finite = best.isfinite()
    own = truth.gather(-1, ids.clamp(min=0))
    return max((logp - best)[finite].abs().max().item(), (logp - own)[finite].abs().max().item())


def worst(case, wanted=None, **settings):
    wanted, asked = wanted or Wanted(), parameters(**settings)
    records = case.driver.sample(case.prompts, asked, wanted)
    return max(
        compared(case, prompt, record, asked, wanted.top_k)
        for prompt, completions in zip(case.prompts, records, strict=True) for record in completions
    )  # fmt: skip


@row("log μ, temperature 1")
def plain(case):
    return Row(worst(case))


@row("temperature 0.7 and 1.5")
def temperature(case):
    return Row(max(worst(case, temperature=0.7), worst(case, temperature=1.5)))


@row("top-K ids and log-probs, K = 20")
def top_20(case):
    return Row(worst(case, Wanted(20), temperature=0.7))


@row("top-K, K = vocabulary")
def whole_vocabulary(case):
    return Row(worst(case, Wanted(case.vocabulary)))


@row("requests of one batch with different K")
def mixed(case):
    widths = (0, 3, 40, 5)
    figures = []
    records = case.driver.sample(
        case.prompts, [parameters(temperature=0.5 + i / 4) for i in range(4)], [Wanted(k) for k in widths]
    )
    for i, (k, prompt, (record,)) in enumerate(zip(widths, case.prompts, records, strict=True)):
        figures.append(compared(case, prompt, record, parameters(temperature=0.5 + i / 4), k))
    return Row(max(figures))


@row("top-p 0.8: log μ, top-K, kept ids")
def top_p(case):
    return Row(worst(case, Wanted(5, case.vocabulary), top_p=0.8))


@row("top-k 8: log μ, top-K, kept ids")
def top_k(case):
    return Row(worst(case, Wanted(5, case.vocabulary), top_k=8))


@row("min-p 0.1: log μ, top-K, kept ids")
def min_p(case):
    return Row(worst(case, Wanted(5, case.vocabulary), min_p=0.1))


@row("top-p, top-k and min-p together, temperature 0.7")
def all_together(case):
    settings = {"top_p": 0.8, "top_k": 30, "min_p": 0.01, "temperature": 0.7}
    return Row(worst(case, Wanted(5, case.vocabulary), **settings))


@row("more kept ids than the limit are counted")
def overflow(case):
    (record,) = case.driver.sample(case.prompts[:1], parameters(top_k=9), Wanted(0, 8))[0]
    return Row(int((record.kept.counts <= 8).sum()), 0, "tokens that look complete")


@row("greedy")
def greedy(case):
    asked = parameters(temperature=0.0)
    (record,) = case.driver.sample(case.prompts[:1], asked, Wanted(3))[0]
    logits = logits_of(case.loaded, case.prompts[0], record.tokens.tolist())
    wrong = (logits.argmax(-1) != torch.from_numpy(record.tokens)).any()
    return Row(math.inf if wrong else compared(case, case.prompts[0], record, asked, 3))


@row("n = 4 completions of one prompt")
def several(case):
    asked = parameters(n=4)
    completions = case.driver.sample(case.prompts[:1], asked, Wanted(3))[0]
    if len(completions) != 4 or len({tuple(record.tokens.tolist()) for record in completions}) < 2:
        return Row(math.inf)
    return Row(max(compared(case, case.prompts[0], record, asked, 3) for record in completions))


@row("an aborted request, and its resumption")
def aborted(case):
    prompt, asked = case.prompts[1], parameters(max_tokens=200)
    first = case.driver.aborted(prompt, asked, Wanted(3), 10)
    if first.is_complete or not 0 < len(first) < 200:
        return Row(math.inf)
    resumed = [*prompt, *first.tokens.tolist()]
    (second,) = case.driver.sample([resumed], parameters(), Wanted(3))[0]
    return Row(max(compared(case, prompt, first, asked, 3), compared(case, resumed, second, parameters(), 3)))


@row("three turns with a tool's answer between them")
def turns(case):
    context, figures = list(case.prompts[0]), []
    for turn in range(3):
        (record,) = case.driver.sample([context], parameters(), Wanted(3))[0]
        record = record.of(turn=turn, replica="only")
        figures.append(compared(case, context, record, parameters(), 3))
        context = [*context, *record.tokens.tolist(), *case.prompts[2][:5]]
    return Row(max(figures))


@row("prefix cache: a prompt that it holds")
def prefix_cache(case):
    figures = []
    for _ in range(2):
        (record,) = case.driver.sample([case.long], parameters(seed=None), Wanted(3))[0]
        figures.append(compared(case, case.long, record, parameters(), 3))
    cached = case.driver.facts["cached"]
    return Row(max(figures) if cached else math.inf, note=f"{cached} of {len(case.long)} prompt tokens from the cache")


@row("chunked prefill: a prompt in several steps")
def chunked_prefill(case):
    prompt = case.long[::-1]
    # vLLM's CPU build fails if a request with a seed has its prompt in several steps.
    (record,) = case.driver.sample([prompt], parameters(seed=None), Wanted(3))[0]
    chunks = case.driver.facts["chunks"]
    return Row(compared(case, prompt, record, parameters(), 3) if chunks > 1 else math.inf, note=f"{chunks} chunks")


@row("1,000 requests at once")
def many(case):
    prompts = [[*case.prompts[0], 5 + i % 400] for i in range(1000)]
    asked = [parameters(max_tokens=4, seed=None) for i in range(1000)]
    records = case.driver.sample(prompts, asked, Wanted(3))
    shown = range(0, 1000, 10)
    if len(records) != 1000 or any(len(record) != 4 for (record,) in records):
        return Row(math.inf)
    return Row(max(compared(case, prompts[i], records[i][0], asked[i], 3) for i in shown))


@row("4,000 draws fit the recorded μ, top-p 0.8")
def draws(case):
    """The mean −log μ of draws from μ is its entropy; a sampler that draws from another distribution is off."""
    asked = parameters(max_tokens=1, seed=None, temperature=0.7, top_p=0.8)
    excess, variance = 0.0, 0.0
    for prompt in case.prompts:
        records = case.driver.sample([prompt] * 1000, asked, Wanted())
        truth = distribution(logits_of(case.loaded, prompt, [0]), asked, case.driver.order)[0][0]
        mu, logp = truth.exp(), truth.clamp(min=-1e9)
        entropy = -(mu * logp).sum().item()
        excess += sum(-float(record.logp[0]) - entropy for (record,) in records)
        variance += 1000 * ((mu * logp**2).sum().item() - entropy**2)
    return Row(abs(excess) / math.sqrt(variance), 4, "standard errors")


@row("weights updated between requests")
def updated_between(case):
    figures = []
    for folder in (case.second, case.first):
        case.load(folder)
        prompt = case.prompts[3]
        (record,) = case.driver.sample([prompt], parameters(), Wanted(3))[0]
        right = record.version is not None and (record.version == case.number).all()
        figures.append(compared(case, prompt, record, parameters(), 3) if right else math.inf)
    return Row(max(figures), note="versions of all tokens are right")


@row("weights updated inside a response")
def updated_inside(case):
    prompt, asked, before = case.prompts[3], parameters(max_tokens=40), case.number
    record = case.driver.updated_inside(prompt, asked, Wanted(3), 12, case.second, before + 1)
    case.loaded, case.number = case.second, before + 1
    parts = {version: np.flatnonzero(record.version == version) for version in (before, before + 1)}
    if sum(map(len, parts.values())) != len(record) or not all(map(len, parts.values())):
        return Row(math.inf)
    figures, boundary = [], parts[before + 1][0]
    for version, folder in ((before, case.first), (before + 1, case.second)):
        logits = logits_of(folder, prompt, record.tokens.tolist())
        truth, _ = distribution(logits, asked, case.driver.order)
        own = truth.gather(-1, torch.from_numpy(record.tokens).long().unsqueeze(-1))[:, 0]
        figures.append((own - torch.from_numpy(record.logp)).abs()[parts[version]].max().item())
    case.load(case.first)
    return Row(max(figures), note=f"{boundary} tokens by the first weights, {len(record) - boundary} by the second")


# ── planted faults ──────────────────────────────────────────────────────────────────────────────────────────────────


def rollout_of(case, records, folder, asked, replica):
    """What a trainer with these weights has before its first step: its own log-probs, and the record."""
    policy = [
        distribution(logits_of(folder, prompt, r.tokens.tolist()), asked, case.driver.order)[0]
        .gather(-1, torch.from_numpy(r.tokens).long().unsqueeze(-1))[:, 0]
        for prompt, (r,) in zip(case.prompts, records, strict=True)
    ]  # fmt: skip
    logp = torch.stack(policy).float()
    behavior = torch.stack([torch.from_numpy(r.logp) for (r,) in records])
    count = len(records)
    return PolicyTokens(logp=logp, version=1), RolloutTokens(
        behavior_logp=behavior, advantage=torch.ones(count), in_loss=torch.ones_like(behavior, dtype=torch.bool),
        version=torch.ones(behavior.shape, dtype=torch.int64), replica=torch.full((count,), replica),
    )  # fmt: skip


def caught(policy, rollout):
    """The gap that the check before the first step refuses; raises if it trains on."""
    try:
        check_first_loss(policy, rollout, "behavior")
    except EngineError:
        return (policy.logp - rollout.behavior_logp).abs().mean().item()
    raise AssertionError("the fault was not caught before the first step")


@row("fault: raw log-probs at temperature 0.5")
def raw(case):
    asked = parameters(temperature=0.5)
    records = case.driver.sample_raw(case.prompts, asked)
    gap = caught(*rollout_of(case, records, case.loaded, asked, 0))
    healthy = case.driver.sample(case.prompts, asked, Wanted())
    check_first_loss(*rollout_of(case, healthy, case.loaded, asked, 0), "behavior")
    return Row(0, 0, "steps trained", note=f"caught before the first step: mean gap {gap:.2f} nats")


@row("fault: a replica with stale weights")
def stale(case):
    asked = parameters()
    case.load(case.first)
    behind = case.driver.sample(case.prompts, asked, Wanted())  # the replica that the update will not reach
    case.load(case.second)
    fresh = case.driver.sample(case.prompts, asked, Wanted())
    watch = ReplicaWatch("raise", warns=True, names=["follows", "stale"])
    both = [rollout_of(case, records, case.second, asked, i) for i, records in enumerate((fresh, behind))]
    sums = [watch.sums(*pair) for pair in both]
    total = type(sums[0])({name: sums[0].added[name] + sums[1].added[name] for name in sums[0].added}, {})
    gap = caught(*both[1])
    check_first_loss(*both[0], "behavior")
    case.load(case.first)
    try:
        watch.check(total, 1)
    except EngineError as error:
        named = "Replica stale stands out at step 1" in str(error)
        return Row(0 if named else 1, 0, "steps trained", note=f"named in the first step: mean gap {gap:.2f} nats")
    return Row(1, 0, "steps trained")


# ── engines with other settings ─────────────────────────────────────────────────────────────────────────────────────


@row("speculative decoding", engine="speculative")
def speculative(case):
    return Row(worst(case, Wanted(3), temperature=0.7))


def quantized(kind):
    def check(case):
        folder = case.driver.quantized(kind, case.first)
        asked = parameters()
        records = case.driver.sample(case.prompts, asked, Wanted(3))
        pairs = [(prompt, record) for prompt, (record,) in zip(case.prompts, records, strict=True)]
        figure, original = (max(compared(case, *pair, asked, 3, of) for pair in pairs) for of in (folder, case.first))
        return Row(figure, note=f"the weights before rounding are off by {original:.2f} nats")

    return check


row("int8 weights", engine="int8")(quantized("int8"))
row("fp8 weights", engine="fp8")(quantized("fp8"))


def outcome(case, name):
    """One row as plain data: passed with its figure, or the sentence with which the sampler refuses."""
    try:
        got = ROWS[name][1](case)
    except Cannot as error:
        return {"row": name, "result": "cannot", "note": str(error)}
    result = "passed" if got.passed else "failed"
    return {"row": name, "result": result, "figure": got.figure, "limit": got.limit, "unit": got.unit, "note": got.note}
