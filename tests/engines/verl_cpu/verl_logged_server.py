"""A sampler that writes down every answer, and a step that takes longer, so that rollouts run while it trains.

Imported by every process of a run (`VERL_USE_EXTERNAL_MODULES`). `TRUSTRL_TEST_LOG` names the file.
"""

import json
import os
import time

from verl.workers.rollout import replica

from trustrl.engines.common.sampler_fields import TOPK_IDS, TOPK_LOGP
from trustrl.engines.verl_cpu import replicas
from trustrl.engines.verl_cpu.transformers_server import TransformersServer

TOKEN_SECONDS = 0.4
"""Sampling a token of the tiny model takes a millisecond, and no weight update would find a response unfinished."""


class LoggedServer(TransformersServer):
    """Logs on the thread that owns the model, so that the version is that of the weights in use."""

    def _draw(self, *args):
        time.sleep(TOKEN_SECONDS)
        return super()._draw(*args)

    def _stamped_answers(self, requests):
        answers = super()._stamped_answers(requests)
        with open(os.environ["TRUSTRL_TEST_LOG"], "a") as log:
            for request, answer in zip(requests, answers, strict=True):
                row = {
                    "prompt": request.prompt_ids, "tokens": answer.token_ids, "logp": answer.log_probs,
                    "version": answer.extra_fields["global_steps"], "stop": answer.stop_reason,
                    "temperature": request.temperature,
                }  # fmt: skip
                if request.topk:
                    row |= {name: answer.extra_fields[name].tolist() for name in (TOPK_IDS, TOPK_LOGP)}
                log.write(json.dumps(row) + "\n")
        return answers


class LoggedReplica(replicas.TransformersReplica):
    server_class = LoggedServer


replica.RolloutReplicaRegistry.register("transformers_cpu", lambda: LoggedReplica)
