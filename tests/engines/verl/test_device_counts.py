"""A region in a real verl worker: its loss waits for nothing, and a step waits for a fixed number of things."""

import json

import pytest

pytest.importorskip("verl")

from support import regions_oracle as oracle
from support.kernel_counts import limits, torch_release
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of

pytestmark = [
    pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention"),
    pytest.mark.xdist_group("device counts"),
]

PER_STEP = {
    "check_recorded": 1,  # raises on NaN before training
    "bypassed": 1,  # whether verl replaced one anchor by the other
    "_everywhere": 2,  # ranks agree on a pass before they run it
    "_lengths": 1, "versions": 2,  # versions arrive as Python objects
    "check_rows": 2, "_check_scored": 1,  # raise on a missing top-K before training
    "rows_to_record": 1,  # row numbers, which are always on the host; the counter cannot tell
    "on_host": 1,  # the step's metrics
}  # fmt: skip
"""Waits of one step, by function."""

PER_MICRO_BATCH = {"of_mask": 1}  # the number of tokens in the loss, a shape
"""Waits of each forward pass of a region on the vocabulary."""

VOCABULARY = ("trustrl/kernels/", "trustrl/core/token_logprobs.py")
"""Counted by tests/contracts/test_device_counts.py."""

MOST_KERNELS = {"binary on μ": 423, "binary on π'": 423, "both anchors": 411, "top-K on μ": 568, "TROLL on π'": 2160}
"""Kernels of the loss of one micro-batch, its sums and verl's own part, 72 with verl's PPO. Lower them with the core's."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    on_ranks("verl_counts.py", 1, oracle.tiny_model(folder / "model"), folder / "found")
    return json.loads((folder / "found").read_text())


def ours(places):
    """By function, of lines of trustrl outside its vocabulary pass."""
    by_function = {}
    for file, function, number in places:
        if file.startswith("trustrl/") and not file.startswith(VOCABULARY):
            by_function[function] = by_function.get(function, 0) + number
    return by_function


@pytest.mark.parametrize("name", oracle.CASES)
def test_the_loss_of_a_micro_batch_waits_for_nothing(found, name):
    loss = found[name]["loss"]
    assert ours(loss["waits"]) == {}
    assert ours(loss["copies"]) == {}
    theirs = sum(number for _, _, number in found["verl's own PPO"]["loss"]["waits"])
    # verl converts each tensor in its metrics and each nested tensor, whatever the loss. Its own loss adds three numbers.
    if "penalties" not in name:
        assert sum(number for _, _, number in loss["waits"]) == theirs - 3


@pytest.mark.parametrize("name", oracle.CASES)
def test_a_step_waits_for_a_fixed_number_of_things(found, name):
    counts = found[name]
    passes = counts["micro_batches"] + 2  # at most: π' is recorded in two micro-batches of three sequences
    most = PER_STEP | {function: number * passes for function, number in PER_MICRO_BATCH.items()}
    waits = ours(counts["step"]["waits"])
    assert waits.keys() <= most.keys()
    assert {function: number for function, number in waits.items() if number > most[function]} == {}
    if not oracle.CASES[name].region.needs().topk and not oracle.CASES[name].region.needs().full:
        assert waits.keys() <= PER_STEP.keys()
    assert ours(counts["step"]["copies"]) == {"_everywhere": 2, "numbers": 1}  # the replica of each sequence


@pytest.mark.skipif(torch_release() != limits()["torch"], reason="another torch may split operations otherwise")
@pytest.mark.parametrize("name", MOST_KERNELS)
def test_the_loss_launches_no_more_kernels_than_recorded(found, name):
    assert found[name]["loss"]["kernels"] <= MOST_KERNELS[name]


def test_verls_own_waits_are_seen(found):
    """The counters would see ours."""
    functions = {function for _, function, _ in found["verl's own PPO"]["loss"]["waits"]}
    assert {"compute_policy_loss_vanilla", "append", "no_padding_2_padding"} <= functions
