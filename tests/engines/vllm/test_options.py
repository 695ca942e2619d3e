"""Settings TRL has no field for reach the engine, once, and nothing stays behind."""

import os
import sys

import pytest

pytest.importorskip("vllm")

from trl.generation import vllm_generation

from trustrl.engines.vllm import cpu_options, extra_llm_options, missing_cpu_environment, options, set_cpu_environment
from trustrl.errors import ConfigError, EngineError

TRL_PASSES = {"gpu_memory_utilization": 0.3, "max_model_len": None, "logprobs_mode": "processed_logprobs"}


@pytest.fixture(autouse=True)
def builder(monkeypatch):
    """TRL's module with an `LLM` that only says what it was given."""
    monkeypatch.setattr(vllm_generation, "LLM", dict)
    return vllm_generation


def test_options_are_added_to_what_trl_passes(builder):
    with extra_llm_options(max_logprobs=64, dtype="float32"):
        llm = builder.LLM(**TRL_PASSES)
    assert llm == {**TRL_PASSES, "max_logprobs": 64, "dtype": "float32"}
    assert builder.LLM is dict


def test_a_setting_trl_leaves_open_may_be_filled_in(builder):
    with extra_llm_options(max_model_len=128, logprobs_mode="processed_logprobs"):
        assert builder.LLM(**TRL_PASSES)["max_model_len"] == 128


def test_a_setting_trl_has_chosen_is_not_overridden(builder):
    words = r"logprobs_mode.*'processed_logprobs', as TRL passes it, got 'raw_logprobs'"
    with pytest.raises(ConfigError, match=words), extra_llm_options(logprobs_mode="raw_logprobs"):
        builder.LLM(**TRL_PASSES)
    assert builder.LLM is dict


def test_the_share_of_memory_may_be_overridden_on_a_cpu_only(builder, monkeypatch):
    with extra_llm_options(gpu_memory_utilization=0.1):
        assert builder.LLM(**TRL_PASSES)["gpu_memory_utilization"] == 0.1
    monkeypatch.setattr(options, "on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"), extra_llm_options(gpu_memory_utilization=0.1):
        builder.LLM(**TRL_PASSES)


def test_trl_is_put_back_after_an_error(builder):
    with pytest.raises(RuntimeError, match="elsewhere"), extra_llm_options(dtype="float32"):
        raise RuntimeError("elsewhere")
    assert builder.LLM is dict


def test_contexts_nest(builder):
    with extra_llm_options(dtype="float32"), extra_llm_options(max_logprobs=5):
        assert builder.LLM() == {"dtype": "float32", "max_logprobs": 5}
    assert builder.LLM is dict


def test_options_that_reach_nobody_are_an_error():
    words = r'max_logprobs must reach a sampler.*vllm_mode="colocate"'
    with pytest.raises(EngineError, match=words), extra_llm_options(max_logprobs=64):
        pass
    with extra_llm_options():
        pass


def test_a_trl_that_builds_elsewhere_is_refused(builder, monkeypatch):
    monkeypatch.delattr(builder, "LLM")
    with pytest.raises(EngineError, match="has no name LLM"), extra_llm_options(dtype="float32"):
        pass


def test_cpu_options_are_nothing_on_a_gpu(monkeypatch):
    assert cpu_options(dtype="bfloat16") == {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
    }
    monkeypatch.setattr(options, "on_cpu", lambda: False)
    assert cpu_options(dtype="bfloat16") == {}


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def nothing_set(self, monkeypatch):
        import torch

        for name in options.CPU_ENVIRONMENT:
            monkeypatch.setenv(name, "")  # so that monkeypatch puts back what was there
            monkeypatch.delenv(name)
        self.threads = []
        monkeypatch.setattr(torch, "set_num_threads", self.threads.append)

    def test_what_is_missing_is_set_before_vllm_is_imported(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "vllm")
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        chosen = {name: value for name, value in options.CPU_ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
        assert missing_cpu_environment() == set_cpu_environment() == chosen
        assert os.environ["OMP_NUM_THREADS"] == "4"
        assert not self.threads
        assert missing_cpu_environment() == {}

    def test_torch_learns_the_number_of_threads_though_it_is_loaded(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "vllm")
        set_cpu_environment()
        assert self.threads == [1]

    def test_afterwards_it_is_an_error_that_says_how_to_start(self):
        with pytest.raises(EngineError, match=r"VLLM_ENABLE_V1_MULTIPROCESSING=0 TORCHDYNAMO_DISABLE=1 .*python"):
            set_cpu_environment()

    def test_an_accelerator_needs_none_of_it(self, monkeypatch):
        import torch

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        assert missing_cpu_environment() == set_cpu_environment() == {}
        assert not self.threads
