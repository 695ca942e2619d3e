"""The calls of engines that are on no package index, as data: at the named commits, they call our functions so."""

import inspect

import pytest

from trustrl.engines import miles, slime

CALLS = {
    "slime 624b824a898a": (slime.region_loss, ("args", "batch", "logits", "sum_of_sample_mean")),
    "slime 624b824a898a at start": (slime.check_arguments, ("args",)),
    "miles 31f1ca961a94": (miles.region_loss, ("args", "batch", "logits", "sum_of_sample_mean")),
    "miles 31f1ca961a94 at start": (miles.check_arguments, ("args",)),
}


@pytest.mark.parametrize("which", CALLS)
def test_a_function_takes_what_the_engine_passes(which):
    function, passed = CALLS[which]
    assert tuple(inspect.signature(function).parameters) == passed
