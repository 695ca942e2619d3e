"""A loss and its sums never wait for the device, whatever the region, and launch no more kernels than recorded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trustrl
from support.device_counts import counted
from support.kernel_counts import limits, loss_and_sums, table, torch_release, totals
from support.vocabulary_cases import CASES, call, loss_of
from trustrl import regions

RAISED = "If the rise is meant, tests/support/kernel_counts.py says how to record the numbers again."


@pytest.mark.parametrize("name", trustrl.presets())
def test_nothing_waits_for_the_device(name):
    counts = loss_and_sums(name)
    assert not counts.waits, str(counts)
    assert not counts.copies, str(counts)
    assert counts.kernels


@pytest.mark.parametrize("name", trustrl.presets())
def test_kernels_and_bytes_have_not_risen(name):
    recorded = limits()
    if recorded["torch"] != torch_release():
        pytest.skip(f"the limits hold for torch {recorded['torch']}, this is {torch.__version__}")
    found = totals(name)
    assert found["kernels"] <= recorded[name]["kernels"], f"{found}. {RAISED}"
    assert found["bytes"] <= recorded[name]["bytes"], f"{found}. {RAISED}"


def test_the_page_has_the_recorded_numbers():
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    assert f"<!-- begin launches -->\n{table()}\n<!-- end launches -->" in page


def test_every_preset_has_limits():
    assert limits().keys() >= set(trustrl.presets()), RAISED


@pytest.mark.parametrize("head_gradient", [True, False], ids=["head trained", "head frozen"])
@pytest.mark.parametrize("name", CASES)
def test_the_vocabulary_pass_waits_for_nothing(name, head_gradient):
    run, *_ = call(name, head_gradient=head_gradient)
    with counted() as counts:
        loss_of(run()).backward()
    assert not counts.waits, str(counts)
    assert not counts.copies, str(counts)


WAITS = {
    "a condition": lambda x: bool((x > 1).any()),
    "boolean indices": lambda x: x[x > 1],
    "assignment at booleans": lambda x: x.masked_fill_(x > 9, 0.0).index_put_((x > 9,), x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 1),
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to the CPU": lambda x: x.to("cpu"),
    "unique": lambda x: x.unique(),
    "repetitions in a tensor": lambda x: x.repeat_interleave(x.long()),
    "equality": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_is_seen_once(kind):
    x = torch.arange(4.0)
    with counted() as counts:
        WAITS[kind](x)
    assert sum(counts.waits.values()) == 1, str(counts)
    assert not counts.copies, str(counts)


def test_what_stays_on_the_device_is_no_wait():
    x = torch.arange(4.0)
    with counted() as counts:
        torch.where(x > 1, x, 0.0).to(x.device)
        x.repeat_interleave(x.long(), output_size=6)
        x[torch.zeros_like(x, dtype=torch.long)]
    assert not counts.waits, str(counts)


def test_one_copy_to_the_host_is_one_wait():
    x = torch.arange(4.0)
    with counted() as counts:
        here = x.cpu()
        here[2:].sum().item()
        (here + here).tolist()
        assert here.data_ptr() != x.data_ptr()
    assert sum(counts.waits.values()) == 1, str(counts)
    assert not counts.kernels, str(counts)
    with counted() as counts:
        (here := x.cpu())[0].item()
        (here + x).tolist()  # on the device again
    assert sum(counts.waits.values()) == 2, str(counts)


@pytest.mark.parametrize("make", [lambda x: torch.tensor([1.0]), lambda x: x.new_tensor(1.0), lambda x: x[[0, 1]]])
def test_a_copy_from_the_host_is_seen(make):
    x = torch.arange(4.0)
    with counted() as counts:
        make(x)
    assert sum(counts.copies.values()) == 1, str(counts)


def test_new_memory_is_counted_once():
    x = torch.zeros(256)  # 1,024 bytes
    with counted() as counts:
        y = x + 1
        y.add_(1).view(2, 128)[0].mul_(2)
        torch.empty(512)
    assert sum(counts.allocated.values()) == 3 * 1024
    assert counts.largest == 2 * 1024
    assert sum(counts.kernels.values()) == 3


def test_lines_are_named():
    policy = trustrl.PolicyTokens(logp=torch.tensor([[-1.0, float("nan")]]))
    rollout = trustrl.RolloutTokens(
        behavior_logp=-torch.ones(1, 2), advantage=torch.ones(1), in_loss=torch.ones(1, 2, dtype=torch.bool)
    )
    reduction = trustrl.TokenMean(num_tokens=2)
    with counted() as counts, pytest.raises(trustrl.errors.NonFiniteError):
        trustrl.policy_loss(policy, rollout, regions.DPPO(), reduction=reduction, on_nonfinite="raise")
    assert {(place.file, place.function) for place in counts.waits} == {
        ("trustrl/core/diagnostics.py", "raise_on_faults")
    }


LAUNCH = """
import torch, trustrl, triton, triton.language as tl
from support.device_counts import counted

@triton.jit
def double(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, 2 * tl.load(at))

x = torch.ones(16)
with counted() as counts:
    x += 1
    double[(1,)](x, SIZE=16)
assert x.tolist() == [4.0] * 16
assert dict(counts.kernels) == {"aten::add_.Tensor": 1, "triton::double": 1}, counts
assert not counts.waits and not counts.copies, counts
double[(1,)](x, SIZE=16)
assert sum(counts.kernels.values()) == 2
"""


@pytest.mark.compiled
def test_a_launch_of_triton_is_one_kernel(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed; `pip install triton==3.7.1` goes with torch 2.13")
    script = tmp_path / "launch.py"  # Triton reads the source of its kernels
    script.write_text(LAUNCH)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
