"""SGLang for the contract suite: its engine with three processes, asked through its `TokenizerManager`."""

import asyncio
import math
from dataclasses import replace

import sglang
from sglang.srt.managers.io_struct import GenerateReqInput

from support.contract.driver import Cannot
from support.sglang_world import Sampler
from support.tiny_models import VOCABULARY
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.sglang.sampler_adapter import FLAT, MASK, SGLangAdapter
from trustrl.errors import EngineError

CHUNK = 128
"""The largest number of prompt tokens in one step."""

ENGINE = {"chunked_prefill_size": CHUNK, "max_total_tokens": 1 << 16, "max_running_requests": 128}
ONE_ENGINE = "the suite starts one engine of SGLang, with float weights and without drafts"


class Driver:
    order = ("top_p", "min_p", "top_k")  # SGLang sorts once, and compares each id with all three

    def __init__(self, folder, engine):
        self.version, self.facts = sglang.__version__, {}
        if engine != "main":
            raise Cannot(ONE_ENGINE)
        self._sampler = Sampler(folder, **ENGINE)
        self._sampler.run(self._sampler.updated(folder, "1", mode="abort"))
        answer = self._sampler.run(self._sampler.answer([5], {"max_new_tokens": 1}))
        self._has_spans = "weight_versions" in answer["meta_info"]
        # Without spans an answer has one version, which is that of all its tokens if every update aborts.
        pause = "retract" if self._has_spans else "abort"
        self.adapter = SGLangAdapter.of(self._sampler.manager.server_args, VOCABULARY, pause=pause)
        # SGLang returns the top-K as arrays only at the end of a request, and refuses both together.
        self.streaming = replace(self.adapter, request_fields=self.adapter.request_fields - {FLAT})

    def sample(self, prompts, parameters, wanted):
        parameters = parameters if isinstance(parameters, list) else [parameters] * len(prompts)
        wanted = wanted if isinstance(wanted, list) else [wanted] * len(prompts)
        requests = [self._request(*request) for request in zip(parameters, wanted, strict=True)]

        async def together():
            answers = (self._sampler.answer(p, *request) for p, request in zip(prompts, requests, strict=True))
            return await asyncio.gather(*answers)

        answers = [one if isinstance(one, list) else [one] for one in self._sampler.run(together())]
        cached = answers[0][0]["meta_info"]["cached_tokens"]
        # SGLang does not tell the number of chunks: this is what its setting makes of the rest of the prompt.
        self.facts = {"cached": cached, "chunks": math.ceil((len(prompts[0]) - cached) / CHUNK)}
        return [
            [self.adapter.record(answer, want) for answer in completions]
            for completions, want in zip(answers, wanted, strict=True)
        ]

    def sample_raw(self, prompts, parameters):
        """Samples, and takes the log-probs with which SGLang scores a prompt: those of temperature 1."""
        if MASK not in self.adapter.request_fields:
            raise Cannot("an SGLang without the mask stops on a CPU when it scores a prompt")
        raw = []
        for prompt, (record,) in zip(prompts, self.sample(prompts, parameters, Wanted()), strict=True):
            scored = {"return_logprob": True, "logprob_start_len": 0}
            sequence = [*prompt, *record.tokens.tolist()]
            answer = self._sampler.run(self._sampler.answer(sequence, {"max_new_tokens": 1}, scored))
            inputs = answer["meta_info"]["input_token_logprobs"][len(prompt) :]
            answer = {
                "output_ids": record.tokens,
                "meta_info": {"output_token_logprobs": inputs, "finish_reason": {"type": "length"}},
            }
            raw.append([self.adapter.record(answer, Wanted())])
        return raw

    def aborted(self, prompt, parameters, wanted, after):
        async def abort():
            self._sampler.manager.abort_request(abort_all=True)

        return self._interrupted(prompt, parameters, wanted, after, abort)

    def update(self, folder, version):
        self._sampler.run(self._sampler.updated(folder, str(version), mode="abort"))

    def updated_inside(self, prompt, parameters, wanted, after, folder, version):
        if not self._has_spans:
            raise Cannot("an answer has one version before SGLang 0.5.19, so updates must abort it")

        async def update():
            await self._sampler.updated(folder, str(version), mode="retract")

        return self._interrupted(prompt, parameters, wanted, after, update)

    def quantized(self, kind, folder):
        raise Cannot(ONE_ENGINE)

    def _request(self, parameters, wanted, adapter=None):
        try:
            return (adapter or self.adapter).request(wanted, parameters)
        except EngineError as error:
            raise Cannot(f"refused: {error}") from error

    def _interrupted(self, prompt, parameters, wanted, after, interrupt):
        """The record of a request that is interrupted once it has drawn about so many tokens."""
        params, fields = self._request(parameters, wanted, self.streaming)
        begun = asyncio.Event()

        async def answered():
            last = None
            # SGLang sends the first tokens of other requests when it has drawn fifty.
            request = GenerateReqInput(input_ids=list(prompt), sampling_params=params, stream=True, **fields)
            async for output in self._sampler.manager.generate_request(request, None):
                last = output
                if len(output["output_ids"]) >= after:
                    begun.set()
            return last

        async def run():
            running = asyncio.create_task(answered())
            await begun.wait()
            await interrupt()
            return await running

        return self.adapter.record(self._sampler.run(run()), wanted)
