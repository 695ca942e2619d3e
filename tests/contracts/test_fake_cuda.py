"""Losses and vocabulary passes run forward on fake CUDA tensors: nothing reads a value, nothing stays on the host."""

import shutil

import pytest

import trustrl
from support import fake_cuda
from support.fake_cuda.cases import CONTROLS, LOSSES, READS

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ is not installed; it compiles the fake device, 20 lines of C++"
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return fake_cuda.answers(fake_cuda.build(tmp_path_factory.mktemp("fake_cuda")))


@pytest.mark.parametrize(("name", "dtype"), LOSSES)
def test_a_loss_and_its_sums_run_forward(answers, name, dtype):
    assert answers[f"loss {name} {dtype}"] == ""


@pytest.mark.parametrize(("name", "dtype", "head"), READS)
def test_the_chunked_pass_runs_forward(answers, name, dtype, head):
    assert answers[f"vocabulary {name} {dtype} {head}"] == ""


REFUSED = {
    "item": "DataDependentOutputException",
    "condition": "DataDependentOutputException",
    "tolist": "DataDependentOutputException",
    "boolean indices": "DynamicOutputShapeException",
    "nonzero": "DynamicOutputShapeException",
    "two devices": "FakeTensorDeviceMismatchError",
    "copy from the host": "0 waits, 1 copies",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_would_wait_for_fails(answers, name):
    assert answers[f"control {name}"].startswith(REFUSED[name])


def test_what_stays_on_the_device_passes(answers):
    assert answers["control nothing"] == ""
    assert answers["control the definition of the vocabulary pass"] == ""


def test_every_control_is_checked():
    assert set(CONTROLS) == {*REFUSED, "nothing", "the definition of the vocabulary pass"}
    assert {name for name, _ in LOSSES} == set(trustrl.presets())
