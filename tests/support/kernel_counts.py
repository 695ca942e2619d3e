"""Kernels and bytes of one call of `policy_loss`, its sums and its backward pass, for every preset.

PYTHONPATH=tests python -m support.kernel_counts            prints the recorded numbers as a table of the documentation
PYTHONPATH=tests TRITON_INTERPRET=1 python -m support.kernel_counts --write    records them as the limits of the tests
"""

import json
import sys
from pathlib import Path

import torch

import trustrl
from support.device_counts import counted
from support.worlds import world

LIMITS = Path(__file__).parents[1] / "contracts" / "kernel_counts.json"
"""The recorded numbers, and the release of torch that they hold for. Another release may split operations otherwise."""


def micro_batch(name, dtype=torch.float32):
    """Returns 64 tokens of a preset: the policy's side, the rollout's, the region and its reduction."""
    region = trustrl.preset(name)
    needs, batch = region.needs(), world(0)
    rollout = batch.rollout(needs.anchor, dtype=dtype, k=max(needs.topk, 20))
    policy = batch.policy_tokens(rollout, dtype=dtype)
    reduction = trustrl.TokenMean(num_tokens=batch.num_tokens)
    if needs.reduction is not None:
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=len(batch.tokens))
    return policy, rollout, region, reduction


def loss_and_sums(name, impl="eager", sums=True):
    """Returns the counts of one micro-batch, with or without its sums."""
    policy, rollout, region, reduction = micro_batch(name)
    with counted() as counts:
        out = trustrl.policy_loss(policy, rollout, region, reduction=reduction, impl=impl)
        if sums:
            out.sums  # noqa: B018  made on first access
        out.loss.backward()
    return counts


def totals(name):
    """Returns the numbers of the eager steps that have a limit."""
    counts = loss_and_sums(name)
    return {"kernels": sum(counts.kernels.values()), "bytes": sum(counts.allocated.values())}


def launches(name):
    """Returns the numbers of the Triton steps that have a limit: with the sums, and the loss alone. Needs Triton."""
    found = {"launches": True, "launches_alone": False}
    return {key: sum(loss_and_sums(name, "triton", sums).kernels.values()) for key, sums in found.items()}


def torch_release():
    """Returns the release of torch without its patch and build."""
    return ".".join(torch.__version__.split(".")[:2])


def limits():
    """Returns the recorded numbers by preset."""
    return json.loads(LIMITS.read_text())


def table():
    """Returns the recorded numbers as a table of the documentation."""
    lines = ["| preset | eager | KB allocated | Triton | Triton, loss alone |", "|---|---|---|---|---|"]
    for name, row in limits().items():
        if name != "torch":
            kilobytes = f"{row['bytes'] / 1024:.0f}"
            lines.append(f"| `{name}` | {row['kernels']} | {kilobytes} | {row['launches']} | {row['launches_alone']} |")
    return "\n".join(lines)


def main(arguments):
    """Prints or records the numbers of every preset."""
    if arguments == ["--write"]:
        found = {name: totals(name) | launches(name) for name in trustrl.presets()}
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items())
        LIMITS.write_text(f'{{\n  "torch": "{torch_release()}",\n{rows}\n}}\n')
    print(table())


if __name__ == "__main__":
    main(sys.argv[1:])
