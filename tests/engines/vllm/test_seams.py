"""The parts of vLLM that trustrl uses, without a model: also for builds that do not run here (`nox -s newest`)."""

from importlib import import_module

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from trustrl.engines.vllm import decode_record


def test_the_recorder_finds_the_methods_that_it_replaces():
    decode_record.install()


def test_the_weight_transfer_finds_its_base_classes():
    import_module("trustrl.engines.vllm.gloo_transfer")


def test_a_request_takes_what_the_recorder_asks_for():
    asked = decode_record.recording(4, max_kept=8, more=None)
    assert SamplingParams(**asked).extra_args == asked["extra_args"]
