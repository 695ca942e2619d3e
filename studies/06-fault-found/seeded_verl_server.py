"""Seeded faults in verl's real sampler. verl loads this module in every process: see `seeded_verl.py`.

The fault is an object in the environment variable `SEEDED_FAULT`, such as {"temperature": 1.2}.
"""

import json
import os
from dataclasses import replace

import torch
from verl.workers.rollout import replica

FAULT = json.loads(os.environ.get("SEEDED_FAULT", "{}"))


def faulty_replica():
    """Returns verl's replica of the transformers sampler with a server that has the fault."""
    from trustrl_verl_cpu.replicas import TransformersReplica
    from trustrl_verl_cpu.transformers_server import TransformersServer

    class FaultyServer(TransformersServer):
        """Samples with other weights or from another distribution than the trainer assumes."""

        syncs = 0

        def _sampled(self, requests):
            begin = [self._model.config.bos_token_id] * FAULT.get("extra_tokens", 0)
            return super()._sampled([replace(one, prompt_ids=[*begin, *one.prompt_ids]) for one in requests])

        def _draw(self, logits_BV, temperature_B1):
            logits_BV = logits_BV / FAULT.get("temperature", 1.0)
            if "top_p" in FAULT:
                scale_B1 = torch.where(temperature_B1 == 0, 1.0, temperature_B1)
                probs, order = torch.softmax(logits_BV / scale_B1, -1).sort(-1, descending=True)
                outside = probs.cumsum(-1) - probs >= FAULT["top_p"]
                dropped = torch.zeros_like(outside).scatter(-1, order, outside)
                logits_BV = logits_BV.masked_fill(dropped, -torch.inf)
            return super()._draw(logits_BV, temperature_B1)

        def _begin_weights(self):
            super()._begin_weights()
            every = FAULT.get("synced_every", 1)
            self.ignores = self.syncs > 0 and (every == 0 or self.syncs % every != 0)
            self.syncs += 1

        def _load_weights(self, bucket):
            if self.ignores:
                self._missing.clear()
                return
            super()._load_weights(bucket)
            if "head_noise" in FAULT:
                head = self._model.lm_head.weight.data
                if not hasattr(self, "head"):
                    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0)) * head.std()
                    self.head = head + FAULT["head_noise"] * noise
                head.copy_(self.head)  # stays as it is

    class FaultyReplica(TransformersReplica):
        server_class = FaultyServer

    return FaultyReplica


replica.RolloutReplicaRegistry.register("transformers_cpu", faulty_replica)
