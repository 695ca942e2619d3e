"""Kernels and bytes of one call of `policy_loss`, its sums and its backward pass, for every preset.

PYTHONPATH=tests python -m support.kernel_counts            prints them as a table of the documentation
PYTHONPATH=tests python -m support.kernel_counts --write    records them as the limits of the test
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


def loss_and_sums(name):
    """Returns the counts of one micro-batch."""
    policy, rollout, region, reduction = micro_batch(name)
    with counted() as counts:
        out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
        out.sums  # noqa: B018  made on first access
        out.loss.backward()
    return counts


def totals(name):
    """Returns the numbers that have a limit."""
    counts = loss_and_sums(name)
    return {"kernels": sum(counts.kernels.values()), "bytes": sum(counts.allocated.values())}


def torch_release():
    """Returns the release of torch without its patch and build."""
    return ".".join(torch.__version__.split(".")[:2])


def limits():
    """Returns the recorded numbers by preset."""
    return json.loads(LIMITS.read_text())


def main(arguments):
    """Prints or records the numbers of every preset."""
    found = {name: totals(name) for name in trustrl.presets()}
    if arguments == ["--write"]:
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items())
        LIMITS.write_text(f'{{\n  "torch": "{torch_release()}",\n{rows}\n}}\n')
        return
    print("| preset | kernels | KB allocated |\n|---|---|---|")
    for name, numbers in found.items():
        print(f"| `{name}` | {numbers['kernels']} | {numbers['bytes'] / 1024:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
