"""A training step with a region on the vocabulary never holds a number per token and word."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("trl")

import torch
from torch.autograd.graph import saved_tensors_hooks

import trustrl
from support import trl_memory_worker as work, trl_uneven, trl_world as world, uneven
from support.largest_tensor import LargestTensor
from support.rendezvous import python_path

LOGITS = work.ROWS * work.COMPLETION * work.V * 4
"""Bytes of the completions' logits in float32: 622 MB."""


def peak_beside_gradients(name):
    """Bytes a step needs beyond weights and gradients; the gradients are 315 MB, nearly all embedding and head."""
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, work.__file__, name], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found["peak"] - found["gradients"]


@pytest.mark.compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["dppo-topk-tv", pytest.param("troll", marks=pytest.mark.long)])
def test_a_step_at_a_real_vocabulary_needs_a_sixth_of_the_logits_memory(name):
    """One copy of the logits is 622 MB, and plain code holds several. TRL's own head, in larger tiles, takes 1,100."""
    used = peak_beside_gradients(name)
    assert used < LOGITS / 6, f"{used / 1e6:.0f} MB"


@pytest.mark.compiled
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_measurement_sees_logits_where_there_are_some():
    used = peak_beside_gradients("all logits")
    assert used > LOGITS, f"{used / 1e6:.0f} MB"


@pytest.mark.parametrize("longest", [uneven.SMALL, pytest.param(uneven.LARGE, marks=pytest.mark.long)])
def test_memory_follows_tokens_and_not_the_longest_completion(longest):
    """One long completion, and 31 of 1/32 of its length; the large case takes 1,132 MB if K ids are padded."""
    for name, found in uneven.peaks(longest, trl_uneven.step_of).items():
        assert found["uneven"].wide < 1.02 * found["even"].wide, name


def largest(call):
    """(most elements returned by any operation, most elements kept for the backward pass)."""
    kept = [0]

    def pack(x):
        kept[0] = max(kept[0], x.numel())
        return x

    mode = LargestTensor()
    with mode, saved_tensors_hooks(pack, lambda x: x):
        call()
    return mode.elements, kept[0]


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["dppo-topk-tv", "dppo-full-kl", "troll"])
def test_no_tensor_of_tokens_times_vocabulary_reaches_autograd(name):
    words, width = 40_000, 16  # several of the tiles the kernels work in
    trainer = world.ours(trustrl.preset(name), world.tiny_model(vocab_size=words, hidden_size=width))
    trainer.model.train()
    inputs = world.sequences()
    tokens = inputs["completion_ids"].numel()
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()

    def step():
        if trainer._needs.full:
            trainer._remember_head()
        recorded = trainer._recorder.record(trainer.model, inputs, version=0, rows=6)
        trainer._compute_loss(trainer.model, inputs | recorded).backward()

    returned, kept = largest(step)
    assert words * width <= returned < tokens * words / 2, "the head's own gradient, and nothing near the logits"
    assert words * width <= kept < tokens * words / 2
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    assert min(largest(lambda: trainer.model(input_ids=ids).logits.log_softmax(-1).sum().backward())) >= tokens * words
