"""Decisions on tokens placed near the thresholds, against an independent float64 decision.

    python benchmarks/near_bounds.py
    python benchmarks/near_bounds.py --tokens 100_000 --impl eager

Each token's divergence is its bound plus an offset between 1e-9 and 1e-5 of either sign. The records are then rounded
to float32, which moves most tokens by about 1e-7, and the decision that counts is that of float64 arithmetic on the
rounded numbers, computed here with numpy and without trustrl. Prints, for each region, the decisions that differ from
it: those of the loss, and those of float32 arithmetic.
"""

import argparse
import sys

import numpy as np
import torch

import trustrl

BATCH = 50_000
OFFSETS = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5)


def distance_between(kind, b, p):
    """Returns the divergence of each row of cells, sampled token first and tail last, in the dtype of the rows."""
    if kind == "tv":
        return 0.5 * np.abs(b - p).sum(-1)
    first, second = (p, b) if kind == "projection" else (b, p)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(first > 0, first * (np.log(first) - np.log(second)), 0.0)
    return terms.sum(-1)


def placed(kind, bound, columns, n, rng):
    """Returns cells (b, π) whose divergence is near the bound, on a line from b to another distribution."""
    b, far = (x / x.sum(-1, keepdims=True) for x in rng.exponential(size=(2, n, columns + 2)) + 0.001)
    target = bound + rng.choice(OFFSETS, n) * rng.uniform(-1, 1, n)
    # Secant steps on the root of the divergence, which is almost linear in the step, or on TV, which is linear.
    power = 1.0 if kind == "tv" else 0.5
    last, step = np.zeros(n), np.full(n, 0.5)
    missed = -(target**power)
    for _ in range(2 if kind == "tv" else 9):
        here = distance_between(kind, b, b + step[:, None] * (far - b)) ** power - target**power
        slope = (here - missed) / np.where(step == last, 1.0, step - last)
        last, missed, step = step, here, np.clip(step - here / np.where(slope > 0, slope, 1.0), 1e-9, 1.0)
    p = b + step[:, None] * (far - b)
    close = np.abs(distance_between(kind, b, p) - bound) <= 2 * max(OFFSETS)
    return b[close], p[close]


def decided(kind, bound, b, p, dtype):
    """Returns True where the divergence of float32 records exceeds the bound, in arithmetic of this dtype."""
    log_b, log_p = (np.log(x).astype(np.float32).astype(dtype) for x in (b[:, :-1], p[:, :-1]))
    b, p = np.exp(log_b), np.exp(log_p)
    floor = 2.0**-23
    sides = []
    for x in (b, p):
        tail = np.maximum(1 - x.sum(-1, keepdims=True, dtype=dtype), 0)
        sides.append(np.concatenate([x, np.maximum(tail, dtype(floor)) if kind != "tv" else tail], -1))
    if kind == "projection":
        sides = [x / x.sum(-1, keepdims=True, dtype=dtype) for x in sides]
    found = distance_between(kind, *sides)
    if kind == "kl":
        found = found - sides[0].sum(-1) + sides[1].sum(-1)  # the cells' masses differ in the last places
    return found > dtype(bound)


def decide_by_loss(region, b, p, impl):
    """Returns True where the loss masks or projects a token that the update pushes outward."""
    n, columns = len(b), b.shape[1] - 2
    log_b, log_p = (torch.from_numpy(np.log(x[:, :-1]).astype(np.float32)) for x in (b, p))
    anchor = region.needs().anchor
    topk, own = None, None
    if columns:
        ids = torch.arange(columns).expand(n, columns).contiguous()
        topk, own = trustrl.TopK(ids, log_b[:, 1:].contiguous(), anchor), log_p[:, 1:].contiguous()
    advantage = torch.where(log_p[:, 0] > log_b[:, 0], 1.0, -1.0)
    rollout = trustrl.RolloutTokens(
        **{f"{anchor}_logp": log_b[:, 0].contiguous()},
        advantage=advantage,
        in_loss=torch.ones(n, dtype=torch.bool),
        token_ids=torch.full((n,), columns + 1),
        topk=topk,
    )
    policy = trustrl.PolicyTokens(logp=log_p[:, 0].contiguous(), topk_logp=own)
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), impl=impl)
    faults = sum(int(count) for name, count in out.sums.added.items() if name.startswith("fault/"))
    if faults:
        raise SystemExit(f"{faults} tokens were dropped as faulty")
    found = out.decision.extra.get("projected", ~out.decision.keep)
    return found.numpy(), (log_p[:, 0] != log_b[:, 0]).numpy()


def regions():
    """Returns (region, divergence, bound, number of columns, share of the tokens) by name."""
    tv, kl, troll = 0.15, 0.05, trustrl.regions.TROLL(k=20)
    both = {"max_increase": tv, "max_decrease": tv}, {"max_increase": kl, "max_decrease": kl}
    return {
        "Binary TV": (trustrl.regions.DPPO(trustrl.regions.BinaryTV(**both[0])), "tv", tv, 0, 7),
        "Binary KL": (trustrl.regions.DPPO(trustrl.regions.BinaryKL(**both[1])), "kl", kl, 0, 5),
        "Top-20 TV": (trustrl.regions.DPPO(trustrl.regions.TopKTV(k=20, **both[0])), "tv", tv, 20, 2),
        "Top-20 KL": (trustrl.regions.DPPO(trustrl.regions.TopKKL(k=20, **both[1])), "kl", kl, 20, 2),
        "Top-64 TV": (trustrl.regions.DPPO(trustrl.regions.TopKTV(k=64, **both[0])), "tv", tv, 64, 1),
        "TROLL, 20 ids": (troll, "projection", troll.bound * (1 + 1e-4), 20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_400_000, help="number of tokens over all regions")
    parser.add_argument("--impl", default="compiled", choices=["eager", "compiled"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    shares = sum(given[-1] for given in regions().values())
    print("| region | tokens | outside | loss differs from float64 | float32 differs from float64 |")
    print("|---|---|---|---|---|")
    total = np.zeros(4, dtype=int)
    for name, (region, kind, bound, columns, share) in regions().items():
        wanted, counts = args.tokens * share // shares, np.zeros(4, dtype=int)
        while counts[0] < wanted:
            b, p = placed(kind, bound, columns, BATCH, rng)
            found, moved = decide_by_loss(region, b, p, args.impl)
            want, plain = (decided(kind, bound, b, p, dtype) & moved for dtype in (np.float64, np.float32))
            counts += [len(b), want.sum(), (found != want).sum(), (plain != want).sum()]
            print(f"\r{name}: {counts[0]:,} of {wanted:,}", end="", file=sys.stderr)
        print(file=sys.stderr)
        print("| {} | {:,} | {:,} | {:,} | {:,} |".format(name, *counts), flush=True)
        total += counts
    print("| all | {:,} | {:,} | {:,} | {:,} |".format(*total))


if __name__ == "__main__":
    main()
