"""TROLL's weight, loss and gradient for one token and one selection of ids, in numpy, from the definition.

A selection has no cell for the other ids, so both sides are normalized over its cells before anything is divided:

    log π̂ = projection of π/Σπ onto the ball around b̂ = b/Σb,   weight = π̂(a)/b̂(a)

`published_cells` and `filled_cells` select; `bucket_cells` adds a cell for the rest, and `dense_cells` keeps every id.
Nothing of trustrl is imported here.
"""

import math
from typing import NamedTuple

import numpy as np

from support.oracle import troll_projection

FILL = 1e-12


class Cells(NamedTuple):
    """The ids of one token that have a cell."""

    ids: list[int]
    policy_fixed: list[bool]
    """True where π is the constant `FILL`."""
    log_anchor: list[float]
    """log b, before it is normalized."""
    sampled: int
    """Place of the sampled id."""
    rest: bool = False
    """True if one more cell holds all other ids."""


def top_ids(logp, k, tail_mass):
    """The most probable ids, at most k, until they hold 1 − tail_mass."""
    found, mass = set(), 0.0
    for i in sorted(range(len(logp)), key=lambda i: -logp[i])[:k]:
        if mass < 1 - tail_mass:
            found.add(i)
        mass += math.exp(logp[i])
    return found


def published_cells(log_p, log_b, sampled, k, tail_mass=1e-5):
    """The union of each policy's own top ids and the sampled one, with `FILL` where a policy does not keep the id."""
    keeps_p, keeps_b = ({sampled} | top_ids(x, k, tail_mass) for x in (log_p, log_b))
    ids = sorted(keeps_p | keeps_b)
    return Cells(
        ids,
        [i not in keeps_p for i in ids],
        [log_b[i] if i in keeps_b else math.log(FILL) for i in ids],
        ids.index(sampled),
    )


def filled_cells(log_p, log_b, sampled, k, tail_mass=0.0):
    """The same union. π has its value everywhere, b has `FILL` at ids that only the policy keeps."""
    return published_cells(log_p, log_b, sampled, k, tail_mass)._replace(policy_fixed=[False] * len(log_p))


def dense_cells(log_p, log_b, sampled):
    return Cells(list(range(len(log_p))), [False] * len(log_p), list(log_b), sampled)


def bucket_cells(log_b, sampled, k, tail_mass=0.0):
    """The anchor's top ids, the sampled one, and one cell for all others."""
    ids = sorted({sampled} | top_ids(log_b, k, tail_mass))
    rest = 1 - sum(math.exp(log_b[i]) for i in ids)
    return Cells(ids, [False] * len(ids), [*(log_b[i] for i in ids), math.log(rest)], ids.index(sampled), rest=True)


def sides(cells, log_p):
    """(log π, log b), both normalized over the cells."""
    policy = [math.log(FILL) if fixed else log_p[i] for i, fixed in zip(cells.ids, cells.policy_fixed, strict=False)]
    if cells.rest:
        policy.append(math.log(1 - sum(math.exp(x) for x in policy)))
    return [np.asarray(x) - math.log(sum(math.exp(y) for y in x)) for x in (policy, cells.log_anchor)]


def troll_weight(cells, log_p, bound):
    """π̂(a)/b̂(a)."""
    policy, anchor = sides(cells, log_p)
    return math.exp(troll_projection(policy, anchor, bound)[cells.sampled] - anchor[cells.sampled])


def troll_loss(cells, log_p, advantage, bound, alpha, target=None):
    """−A·π̂(a)/b̂(a) + α·KL(π‖target), the target being π̂ itself if there is none."""
    policy, anchor = sides(cells, log_p)
    projected = troll_projection(policy, anchor, bound)
    target = projected if target is None else target
    pull = float(np.sum(np.exp(policy) * (policy - target)))
    return -advantage * math.exp(projected[cells.sampled] - anchor[cells.sampled]) + alpha * pull


def troll_gradient(cells, log_p, advantage, bound, alpha, step=1e-5):
    """∂ℓ/∂logits by central differences, with the selection and the target of the pull held fixed."""
    log_p = np.asarray(log_p, np.float64)
    target = troll_projection(*sides(cells, log_p), bound)

    def at(j, move):
        x = log_p.copy()
        x[j] += move
        return troll_loss(cells, x - math.log(np.exp(x).sum()), advantage, bound, alpha, target)

    return np.array([(at(j, step) - at(j, -step)) / (2 * step) for j in range(len(log_p))])
