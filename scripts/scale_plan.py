"""Tables of docs/scale.md: the cost of trustrl in one step and in a day of a billion tokens, by arithmetic.

python scripts/scale_plan.py    writes them between the markers of the page
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch

import trustrl
from trustrl.recording.schema import bytes_per_token
from trustrl.runner.plan import plan
from trustrl.runner.plan_estimates import BYTES, VERL_LOGITS
from trustrl.runner.recipe import load

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/scale.md"
D, V, MICRO_BATCH = 4096, 151_936, 16_384
STEPS = {1: 128 * 512, 8: 1024 * 1024, 128: 8192 * 4096, 1024: 32_768 * 8192}
"""Response tokens of a step, by number of GPUs."""

DAY = 10**9
ON_DISK, ON_DISK_TOP20, SAMPLE = 25, 118, 0.01  # measured: bytes a row (docs/guides/record.md), and a share
PER_LAUNCH = 10e-6  # measured: seconds of the host for an operation (benchmarks/host_time.py)
COUNTS = json.loads((ROOT / "tests/contracts/kernel_counts.json").read_text())  # counted
DECODED, LISTED = 14e-6, 139e-6  # measured: sampler's seconds a token at K = 64, arrays and dictionaries (trl.md)
AUDITED = 2_340_000  # measured: rows a CPU second, five regions (docs/guides/audit.md)


def record_bytes(preset: str, *settings: str) -> int:
    """Returns the bytes that the region keeps for a token on verl, as in `trustrl plan`."""
    # The rate changes no byte. A lower one would not move weights in bf16, and the plan would warn.
    model = [f"model.hidden_size={D}", "model.dtype=bfloat16", "optimiser.learning_rate=1e-4"]
    made = plan(load(str(ROOT / "recipes/qwen3-128gpu.toml"), [f"region.preset={preset}", *model, *settings]))
    return made.roles.record_bytes or 0


def vectors() -> int:
    """Returns the bytes of the two vectors that cross ranks, for Binary TV."""
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.full((1, 1), -1.0), advantage=torch.ones(1), in_loss=torch.ones(1, 1, dtype=torch.bool)
    )
    policy = trustrl.PolicyTokens(logp=torch.full((1, 1), -1.1))
    out = trustrl.policy_loss(policy, rollout, trustrl.preset("dppo-binary-tv"), reduction=trustrl.TokenSum())
    return sum(8 * one.numel() for one in out.sums.flat())


def size(value: float) -> str:
    """Returns a number of bytes with up to three digits and a unit."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.{0 if value >= 9.95 else 1}f} {unit}" if value else "0"
        value /= 1000
    raise OverflowError(value)


def micro_batches(gpus: int, tokens: int) -> int:
    """Returns the number of micro-batches on each rank."""
    return -(-tokens // gpus // MICRO_BATCH)


def launches(preset: str, key: str, gpus: int, tokens: int) -> int:
    """Returns the number of operations that a rank launches in a step."""
    return COUNTS[preset][key] * micro_batches(gpus, tokens)


def host_time(preset: str, key: str, gpus: int, tokens: int) -> str:
    """Returns the time of the host for these launches."""
    seconds = PER_LAUNCH * launches(preset, key, gpus, tokens)
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def row(name: str, value: Callable[[int, int], str]) -> str:
    """Returns a row of the table with one column per number of GPUs."""
    return f"| {name} | " + " | ".join(value(gpus, tokens) for gpus, tokens in STEPS.items()) + " |"


def step_table() -> str:
    """Returns the table of one step."""
    top20, troll = record_bytes("dppo-topk-tv"), record_bytes("troll")
    exact = record_bytes("dppo-full-tv", "region.anchor=proximal")
    held_by_pass = 2 * V * D + MICRO_BATCH * (6 * D + 31 * 64)
    held_by_pass += max(64 * 2**20, 2 * MICRO_BATCH * V // 16) + 2 * MICRO_BATCH * D  # as `trustrl plan` on GPUs
    return "\n".join([
        "| | " + " | ".join(f"{gpus:,} GPU{'s' * (gpus > 1)}" for gpus in STEPS) + " |",
        "|---" * 5 + "|",
        row("response tokens of a step", lambda _, n: f"{n:,}"),
        row("of these on each rank", lambda gpus, n: f"{n // gpus:,}"),
        row("micro-batches on each rank", lambda gpus, n: f"{micro_batches(gpus, n)}"),
        row("Binary: launches on each rank", lambda *step: f"{launches('dppo-binary-tv', 'launches', *step):,}"),
        row("Binary: host time, 10 µs a launch", lambda *step: host_time("dppo-binary-tv", "launches", *step)),
        row("Binary: host time without Triton", lambda *step: host_time("dppo-binary-tv", "kernels", *step)),
        row("TROLL: host time", lambda *step: host_time("troll", "launches", *step)),
        row("TROLL: host time without Triton", lambda *step: host_time("troll", "kernels", *step)),
        row("Binary on μ: kept on each rank", lambda *_: "0"),
        row("Top-20 on μ: through the engine's queue", lambda _, n: size(top20 * n)),
        row("Top-20 on μ: kept on each rank", lambda gpus, n: size(top20 * n / gpus)),
        row("TROLL on π', K = 64: kept on each rank", lambda gpus, n: size(troll * n / gpus)),
        row("exact on π': kept on each rank", lambda gpus, n: size(exact * n / gpus)),
        row("exact: copy of the output layer on each rank", lambda *_: size(2 * V * D)),
        row("check of the sampler: one float32 array of 512 rows", lambda *_: size(4 * 512 * V)),
        row("vocabulary pass, K = 64: held on each rank", lambda *_: size(held_by_pass)),
        row("whole logits in its place, one float32 array", lambda *_: size(BYTES["float32"] * V * MICRO_BATCH)),
        row("the same as verl's own pass holds them", lambda *_: size(VERL_LOGITS * 4 * V * MICRO_BATCH)),
        row("metrics: sent by each rank, in a ring", lambda gpus, _: size(2 * (gpus - 1) / gpus * vectors())),
        row("metrics: sent by all ranks", lambda gpus, _: size(2 * (gpus - 1) * vectors())),
        row("recording 1%: written on each rank", lambda gpus, n: size(SAMPLE * ON_DISK * n / gpus)),
        row("recording: files", lambda gpus, _: f"{gpus:,}"),
        row("recording: eight steps in each rank's memory", lambda gpus, n: size(8 * bytes_per_token(0) * n / gpus)),
    ])  # fmt: skip


def day_table() -> str:
    """Returns the table of a day of a billion tokens."""
    top20 = record_bytes("dppo-topk-tv")
    return "\n".join([
        "| | a day | from |",
        "|---|---|---|",
        f"| anchors: log μ | {size(4 * DAY)} | 4 bytes |",
        f"| Top-20 through the queue | {size(top20 * DAY)} | 8 K |",
        f"| Top-64 through the queue | {size(8 * 64 * DAY)} | 8 K |",
        f"| the whole distribution, in float32 | {size(4 * V * DAY)} | 4 V: for studies |",
        f"| recording 1%, sampled token | {size(SAMPLE * ON_DISK * DAY)} | 25 bytes a row |",
        f"| recording 1%, with a top-20 | {size(SAMPLE * ON_DISK_TOP20 * DAY)} | 118 bytes a row |",
        f"| recording everything, sampled token | {size(ON_DISK * DAY)} | 25 bytes a row |",
        f"| auditing the 1%, five regions | {SAMPLE * DAY / AUDITED:.0f} s of one core | 2,340,000 rows a second |",
        f"| auditing everything, five regions | {DAY / AUDITED / 60:.0f} min of one core | 2,340,000 rows a second |",
        f"| recording μ's Top-64 in the samplers | {DECODED * DAY / 3600:.1f} h of one core | 14 µs a token |",
        f"| the same from vLLM's dictionaries | {LISTED * DAY / 3600:.0f} h of one core | 139 µs a token |",
        f"| region, loss and metrics: Binary TV | {249e-9 * DAY:.0f} s of one core | 249 µs per 1,000 tokens |",
        f"| the same: TROLL with 20 ids | {2112e-9 * DAY / 60:.0f} min of one core | 2,112 µs per 1,000 tokens |",
    ])  # fmt: skip


def page() -> str:
    """Returns the page with its tables written again."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in {"step": step_table(), "day": day_table()}.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        text, found = re.subn(f"{begin}.*?{end}", lambda _, new=f"{begin}\n{table}\n{end}": new, text, flags=re.S)
        if found != 1:
            raise SystemExit(f"{PAGE} must have one {begin!r} followed by one {end!r}.")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
