"""A small world of synonyms: a vocabulary of 5,120 Zipf-distributed tokens in which most good tokens are rare.

A prompt is a pair of attributes. An answer has 20 tokens. Every token is a synonym of one of 128 concepts, and each
place of the answer admits the synonyms of two concepts, which the prompt and the previous token's concept decide. An
answer is right if every token is admitted. The corpus is Zipf-distributed and contains errors, more of them in some
places, so a policy trained on it is competent and can improve.

Shapes: B answers, T places, N tokens, C concepts, M synonyms, V = C·M tokens, D hidden units.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CONCEPTS, SYNONYMS, PLACES, VALUES = 128, 40, 20, 8
VOCABULARY = CONCEPTS * SYNONYMS
HARD = (3, 8, 13, 18)
"""Places where the corpus is often wrong."""

EASY_ERROR, HARD_ERRORS = 0.004, (0.1, 0.45)
SECOND = 0.3
"""Share of the second of two admitted concepts in the corpus."""

HELD_OUT = 16
"""Prompts of the 64 that no rollout uses."""

HIDDEN = 48
WORLD_SEED = 20
START = Path(__file__).parent / ".cache" / "start.pt"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The rules of the world, drawn once from a fixed seed."""

    candidates: Tensor
    """(T, values, 4): concepts 0 and 1 are admitted after a concept of kind 0, concepts 2 and 3 after kind 1."""

    error: Tensor
    """(T, values): probability that the corpus has a concept that is not admitted."""

    synonym: Tensor
    """(M,): Zipf distribution of the synonyms of a concept."""

    train: Tensor
    held_out: Tensor
    """(n, 2): prompts as pairs of attribute values. The corpus has both, rollouts have `train` alone."""

    def attribute(self, prompts: Tensor) -> Tensor:
        """Returns the attribute value (B, T) that rules each place: the first at even places, the second at odd."""
        return prompts[:, torch.arange(PLACES) % 2]

    def admitted(self, place: int, value: Tensor, kind: Tensor) -> Tensor:
        """Returns the two admitted concepts (B, 2) at a place."""
        return self.candidates[place, value].view(-1, 2, 2)[torch.arange(len(value)), kind]

    def right(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Returns whether each token (B, T) is admitted after the one before it."""
        concepts = tokens // SYNONYMS
        kinds = functional.pad(concepts[:, :-1] % 2, (1, 0))
        rows = self.candidates[torch.arange(PLACES), self.attribute(prompts)].unflatten(-1, (2, 2))
        pair = rows.gather(2, kinds[..., None, None].expand(-1, -1, 1, 2)).squeeze(2)
        return (pair == concepts.unsqueeze(-1)).any(-1)

    def corpus(self, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """Returns one answer (B, T) of the corpus to each prompt, errors included."""
        value, tokens = self.attribute(prompts), []
        kind = torch.zeros(len(prompts), dtype=torch.long)
        for place in range(PLACES):
            wrong = torch.rand(len(prompts), generator=generator) < self.error[place, value[:, place]]
            second = torch.rand(len(prompts), generator=generator) < SECOND
            pair = self.admitted(place, value[:, place], kind ^ wrong.long())
            concept = pair.gather(1, second.long().unsqueeze(1)).squeeze(1)
            synonym = torch.multinomial(self.synonym, len(prompts), replacement=True, generator=generator)
            tokens.append(concept * SYNONYMS + synonym)
            kind = concept % 2
        return torch.stack(tokens, dim=1)


@cache
def grammar() -> Grammar:
    """Returns the grammar. Concepts are Zipf-distributed; each candidate pair has one concept of each kind."""
    generator = torch.Generator().manual_seed(WORLD_SEED)
    usage = 1.0 / torch.arange(1, CONCEPTS // 2 + 1) ** 0.7
    rows = [
        torch.stack([torch.multinomial(usage, 2, generator=generator) * 2 + kind for kind in (0, 1)], dim=1).flatten()
        for _ in range(PLACES * VALUES)
    ]
    error = torch.full((PLACES, VALUES), EASY_ERROR)
    low, high = HARD_ERRORS
    error[list(HARD)] = low + (high - low) * torch.rand(len(HARD), VALUES, generator=generator)
    synonym = 1.0 / torch.arange(1, SYNONYMS + 1)
    order = torch.randperm(VALUES**2, generator=generator)
    prompts = torch.stack([order // VALUES, order % VALUES], dim=1)
    candidates = torch.stack(rows).view(PLACES, VALUES, 4)
    return Grammar(candidates, error, synonym / synonym.sum(), prompts[HELD_OUT:], prompts[:HELD_OUT])


class Policy(nn.Module):
    """A policy that reads the prompt's attribute, the place and the previous token: two layers and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Parameter(torch.randn(PLACES * VALUES, HIDDEN))
        self.embedding = nn.Parameter(torch.randn(VOCABULARY + 1, HIDDEN))
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) / math.sqrt(HIDDEN))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def hidden(self, place: Tensor, value: Tensor, previous: Tensor) -> Tensor:
        """Returns hidden states (N, D); `previous` is the token before, VOCABULARY at the first place."""
        first = torch.tanh(self.plan[place * VALUES + value] + self.embedding[previous])
        return first + torch.tanh(self.mix(first))

    def at_answers(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Returns the hidden states (B·T, D) before each token of the answers."""
        value = grammar().attribute(prompts)
        place = torch.arange(PLACES).expand_as(value)
        previous = functional.pad(tokens[:, :-1], (1, 0), value=VOCABULARY)
        return self.hidden(place.flatten(), value.flatten(), previous.flatten())


class LogProbs(torch.autograd.Function):
    """log π at some columns of each row, and log Σ_v exp(h·W_v + b_v), with one matrix of probabilities kept.

    The backward pass overwrites the matrix, so it can run once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probs (N, K) and log normalizers (N,)."""
        # One product with the bias as a column: torch.addmm copies the bias to every row first.
        logits = functional.pad(hidden, (0, 1), value=1.0) @ torch.cat([head, bias.unsqueeze(1)], dim=1).T
        most = logits.amax(1, keepdim=True)
        logits -= most
        picked = logits.gather(1, ids)
        total = logits.exp_().sum(1, keepdim=True)
        ctx.save_for_backward(hidden, head, logits, total, ids)
        normalizer = total.log()
        return picked - normalizer, (most + normalizer).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Returns the gradients of hidden states, head and bias."""
        at_ids, at_normalizer = slopes
        hidden, head, weights, total, ids = ctx.saved_tensors
        weights.mul_((at_normalizer.unsqueeze(1) - at_ids.sum(1, keepdim=True)) / total)
        weights.scatter_add_(1, ids, at_ids)
        return weights @ head, (hidden.T @ weights).T, weights.sum(0), None


def logp_at(policy: Policy, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log π at `ids` (N, K) and log Σ exp of each row, with gradient."""
    return LogProbs.apply(hidden, policy.head, policy.bias, ids)


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a column of each row, drawn in proportion to the weights: first a block of columns, then one in it."""
    blocks = weights.view(len(weights), -1, SYNONYMS)
    block = torch.multinomial(blocks.sum(-1), 1, generator=generator).squeeze(1)
    inside = torch.multinomial(blocks[torch.arange(len(weights)), block], 1, generator=generator).squeeze(1)
    return block * SYNONYMS + inside


@torch.no_grad()
def evaluate(policy: Policy, seed: int = 0, answers: int = 16) -> tuple[float, float]:
    """Returns the expected accuracy on held-out prompts and its standard error.

    P(right) = E_q[Π_t m_t], where m_t is the policy's mass on admitted tokens and q draws from the policy restricted to
    them. Each answer counts with its probability of being right so far, so no answer is wasted on a coin toss.
    """
    rules, generator = grammar(), torch.Generator().manual_seed(seed)
    prompts = rules.held_out.repeat(answers, 1)
    value, rows = rules.attribute(prompts), torch.arange(len(prompts))
    previous, kind = torch.full((len(prompts),), VOCABULARY), torch.zeros(len(prompts), dtype=torch.long)
    log_right = torch.zeros(len(prompts), dtype=torch.float64)
    for place in range(PLACES):
        hidden = policy.hidden(torch.full_like(previous, place), value[:, place], previous)
        logits = torch.addmm(policy.bias, hidden, policy.head.T)
        weights = logits.sub_(logits.amax(1, keepdim=True)).exp_()
        pair = rules.admitted(place, value[:, place], kind)
        good = weights.view(len(prompts), CONCEPTS, SYNONYMS)[rows.unsqueeze(1), pair].flatten(1)
        log_right += (good.sum(1).double() / weights.sum(1).double()).log()
        at = draw(good.clamp(min=1e-30), generator)
        concept = pair[rows, at // SYNONYMS]
        previous, kind = concept * SYNONYMS + at % SYNONYMS, concept % 2
    by_prompt = log_right.exp().view(answers, -1)
    error = (by_prompt.var(0) / answers).sum().sqrt() / by_prompt.shape[1] if answers > 1 else torch.tensor(math.nan)
    return float(by_prompt.mean()), float(error)


def pretrain(steps: tuple[int, int] = (1500, 300), *, progress: bool = True) -> Policy:
    """Trains a policy on the corpus: first one row for each concept, which is cheap, then one for each token."""
    generator = torch.Generator().manual_seed(WORLD_SEED + 1)
    torch.manual_seed(WORLD_SEED + 2)
    policy = Policy()
    _train_concepts(policy, generator, steps[0], progress=progress)

    def loss_of(prompts: Tensor, tokens: Tensor) -> Tensor:
        return -logp_at(policy, policy.at_answers(prompts, tokens), tokens.view(-1, 1))[0].mean()

    _descend("tokens", loss_of, list(policy.parameters()), generator, (steps[1], 128, 1e-3), progress=progress)
    return policy


def _train_concepts(policy: Policy, generator: torch.Generator, steps: int, *, progress: bool) -> None:
    """Trains the body with synonyms tied, then unties them: each row gets noise, and its bias the log frequency."""
    head, embedding = (
        nn.Parameter(x[::SYNONYMS].detach().clone()) for x in (policy.head, policy.embedding)
    )  # the embedding's last row is that of the first place
    bias, places = nn.Parameter(torch.zeros(CONCEPTS)), torch.arange(PLACES)

    def loss_of(prompts: Tensor, tokens: Tensor) -> Tensor:
        concepts = tokens // SYNONYMS
        before = functional.pad(concepts[:, :-1], (1, 0), value=CONCEPTS)
        first = torch.tanh(policy.plan[places * VALUES + grammar().attribute(prompts)] + embedding[before])
        logits = (first + torch.tanh(policy.mix(first))) @ head.T + bias
        return functional.cross_entropy(logits.flatten(0, 1), concepts.flatten())

    parameters = [head, embedding, bias, policy.plan, *policy.mix.parameters()]
    _descend("concepts", loss_of, parameters, generator, (steps, 256, 5e-3), progress=progress)
    concepts = torch.arange(VOCABULARY) // SYNONYMS
    with torch.no_grad():
        policy.head.copy_(head[concepts] + 0.05 * torch.randn(VOCABULARY, HIDDEN, generator=generator))
        policy.bias.copy_(bias[concepts] + grammar().synonym.log().repeat(CONCEPTS))
        noise = 0.1 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
        policy.embedding.copy_(torch.cat([embedding[concepts] + noise, embedding[CONCEPTS:]]))


def _descend(
    name: str,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: list[nn.Parameter],
    generator: torch.Generator,
    schedule: tuple[int, int, float],
    *,
    progress: bool,
) -> None:
    """Minimizes a loss over batches of the corpus with Adam; `schedule` is steps, batch size and learning rate."""
    steps, size, rate = schedule
    rules = grammar()
    every = torch.cat([rules.train, rules.held_out])
    optimizer = torch.optim.Adam(parameters, lr=rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        prompts = every[torch.randint(len(every), (size,), generator=generator)]
        loss = loss_of(prompts, rules.corpus(prompts, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        if progress and step % 250 == 0:
            print(f"pre-training on {name}: step {step} of {steps}, loss {loss.item():.3f}", file=sys.stderr)


def start() -> Policy:
    """Returns a copy of the pre-trained policy, which the first call makes and stores."""
    policy = Policy()
    if not START.exists():
        START.parent.mkdir(exist_ok=True)
        made = pretrain()
        partial = START.with_suffix(".partial")
        torch.save(made.state_dict(), partial)
        partial.rename(START)
    policy.load_state_dict(torch.load(START, weights_only=True))
    return policy
