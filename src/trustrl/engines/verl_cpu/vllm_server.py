"""vLLM as verl's sampler on a CPU, in an environment of its own: it needs another transformers than verl.

This module is imported in both environments. vLLM itself is imported where it runs, verl nowhere.
"""

from collections import defaultdict
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from trustrl.engines.verl_cpu.contract import Answer, Limits, Request, scores
from trustrl.engines.verl_cpu.server import BatchingServer
from trustrl.engines.verl_cpu.weights import Bucket
from trustrl.engines.vllm.options import cpu_options
from trustrl.engines.vllm.reload import forget_prefixes, model_runner_of, reloaded
from trustrl.engines.vllm.scoring import score
from trustrl.errors import EngineError

MAX_LOGPROBS = 64
"""The largest K of a scoring request, unless `engine_kwargs.vllm_cpu.max_logprobs` says otherwise."""


class VLLMServer(BatchingServer):
    """Samples and scores with vLLM's `LLM`, in this process.

    Args:
        path: The model's folder.
        limits: Lengths of prompts and responses.
        batch_size: Requests answered together at most.
        options: Arguments for `LLM`.
    """

    def __init__(self, path: str, limits: Limits, *, batch_size: int, options: dict[str, Any]) -> None:
        super().__init__(limits, batch_size)
        self._path, self._options = path, options
        self._reload: ExitStack | None = None
        self._loaded = 0

    def _start(self) -> None:
        options = {
            "max_logprobs": MAX_LOGPROBS,
            "max_model_len": self._limits.total + 1,  # scoring a sequence also samples a token
            "max_num_seqs": self._batch_size,
            "disable_log_stats": True,
            **cpu_options(dtype=self._options.get("dtype", "float32")),
            **self._options,
            # The ratio is one of what was sampled from, at any temperature.
            "logprobs_mode": "processed_logprobs",
        }
        self._llm = import_module("vllm").LLM(model=self._path, **options)

    def _answers(self, requests: list[Request]) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(requests)
        groups: dict[int | None, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[request.prompt_logprobs].append(i)
        for k, places in groups.items():
            group = [requests[i] for i in places]
            found = self._sampled(group) if k is None else self._scored(group, k)
            for i, answer in zip(places, found, strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _sampled(self, requests: list[Request]) -> list[Answer]:
        make: Any = import_module("vllm").SamplingParams
        parameters = [
            make(**(
                {"detokenize": False, **request.options, "max_tokens": request.max_tokens}
                | {"temperature": request.temperature, "logprobs": 0, "flat_logprobs": True}
            ))
            for request in requests
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        found = self._llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
        outputs = [output.outputs[0] for output in found]
        return [
            # Entries of one position begin with the sampled token's.
            Answer(list(output.token_ids), [output.logprobs.logprobs[start] for start in output.logprobs.start_indices])
            for output in outputs
        ]

    def _scored(self, requests: list[Request], k: int) -> list[Answer]:
        sequences = [request.prompt_ids for request in requests]
        found = score(self._llm, sequences, [1] * len(sequences), k)
        answers = []
        for row, sequence in enumerate(sequences):
            n = len(sequence) - 1
            if k:
                answers.append(scores(found.top_ids[row, :n].tolist(), found.top_logp[row, :n].tolist(), k))
            else:
                logps = found.logp[row, :n].tolist()
                answers.append(scores([[token] for token in sequence[1:]], [[logp] for logp in logps], k))
        return answers

    def _begin_weights(self) -> None:
        if self._reload is not None:
            self._reload.close()
        self._reload, self._loaded = ExitStack(), 0
        runner = model_runner_of(self._llm)
        self._reload.enter_context(reloaded(runner))
        self._runner = runner

    def _load_weights(self, bucket: Bucket) -> None:
        if self._reload is None:
            raise EngineError("begin_weights must be called before load_weights, and it was not.")
        tensors = bucket.tensors()
        self._runner.model.load_weights(iter(tensors))
        self._loaded += len(tensors)

    def _end_weights(self) -> None:
        reload, self._reload = self._reload, None
        if reload is None or not self._loaded:
            raise EngineError(f"Weights must be sent before end_weights, got {self._loaded} tensors.")
        reload.close()
        forget_prefixes(self._llm)
