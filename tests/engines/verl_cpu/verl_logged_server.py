"""A sampler that writes down every answer, and draws slowly, so that weight updates find responses unfinished.

Imported by every process of a run (`VERL_USE_EXTERNAL_MODULES`). `TRUSTRL_TEST_LOG` names the file.
"""

import json
import os
from collections import Counter

from verl.workers.rollout import replica

from trustrl.engines.common.sampler_fields import TOPK_IDS, TOPK_LOGP
from trustrl_verl_cpu import replicas
from trustrl_verl_cpu.transformers_server import TransformersServer

TOKEN_SECONDS = 0.4
"""Sampling a token of the tiny model takes a millisecond, and no weight update would find a response unfinished."""

STEP_PROMPTS, COMPLETIONS = 8, 4
"""Prompts of one step, and completions of each."""

SURPLUS_TOKEN_SECONDS = 10
"""Sampling a token takes up to so long once the step has its responses: until the trainer, however busy, interrupts."""


class LoggedServer(TransformersServer):
    """Logs on the thread that owns the model, so that the version is that of the weights in use.

    Interrupted responses continue before others begin. At the end of the queue, where verl puts them, a short run might
    end before it trains on one.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._prompts = {}  # of interrupted responses, by prompt and tokens
        self._completed = Counter()  # completions to train on, by prompt
        self._groups = Counter()  # prompts with all their completions, by the version that finished them

    async def _until_quiet(self):
        await super()._until_quiet()
        self._waiting.sort(key=lambda waiting: self._turn(waiting[0]))

    def _turn(self, request):
        if not request.wanted.top_k:  # evaluation, for which the trainer waits
            return 0
        return 1 if tuple(request.prompt_ids) in self._prompts else 2

    def _draw(self, *args):
        step_is_complete = self._groups[self._global_steps] >= STEP_PROMPTS
        self._interrupted.wait(SURPLUS_TOKEN_SECONDS if step_is_complete else TOKEN_SECONDS)
        return super()._draw(*args)

    def _count(self, request, answer):
        prompt = self._prompts.get(tuple(request.prompt_ids), tuple(request.prompt_ids))
        if answer.stop_reason == "aborted":
            self._prompts[*request.prompt_ids, *answer.token_ids] = prompt
            return
        self._completed[prompt] += 1
        if self._completed[prompt] % COMPLETIONS == 0:
            self._groups[self._global_steps] += 1

    def _stamped_answers(self, requests):
        answers = super()._stamped_answers(requests)
        with open(os.environ["TRUSTRL_TEST_LOG"], "a") as log:
            for request, answer in zip(requests, answers, strict=True):
                if request.wanted.top_k:
                    self._count(request, answer)
                row = {
                    "prompt": request.prompt_ids, "tokens": answer.token_ids, "logp": answer.log_probs,
                    "version": answer.extra_fields["global_steps"], "stop": answer.stop_reason,
                    "temperature": request.temperature,
                }  # fmt: skip
                if request.wanted.top_k:
                    row |= {name: answer.extra_fields[name].tolist() for name in (TOPK_IDS, TOPK_LOGP)}
                log.write(json.dumps(row) + "\n")
        return answers


class LoggedReplica(replicas.TransformersReplica):
    server_class = LoggedServer


replica.RolloutReplicaRegistry.register("transformers_cpu", lambda: LoggedReplica)
