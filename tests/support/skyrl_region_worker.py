"""trustrl's SkyRL worker in a Ray actor, with a few calls for tests: other weights, another region, gradients."""

from typing import Any

from support import skyrl_on_cpu

skyrl_on_cpu.install()

import ray
import torch
from skyrl.backends.skyrl_train.utils import ppo_utils

from support.fsdp2_shardings import whole
from trustrl.engines import skyrl as engine
from trustrl.engines.skyrl.vocabulary_trainer import RegionTrainer
from trustrl.engines.skyrl.vocabulary_worker import RegionPolicyWorkerBase


class Worker(RegionPolicyWorkerBase):
    def set_case(self, settings: Any, weights: dict[str, torch.Tensor]) -> None:
        """Another region and other trainer settings, and the rollout's weights."""
        self.cfg = settings
        self._needs = engine.region_of(settings.algorithm.policy_loss_type, settings.algorithm).needs()
        self.policy_loss_fn = ppo_utils.PolicyLossRegistry.get(settings.algorithm.policy_loss_type)
        self.model.remove_microbatch_padding = settings.remove_microbatch_padding
        # With this name and no mask, SkyRL packs; the model's own attention keeps the sequences apart.
        self.model.attn_implementation = "flash_attention_2" if settings.remove_microbatch_padding else "sdpa"
        self._whole_reader = getattr(self, "_whole_reader", self._vocabulary)
        self._vocabulary = self._whole_reader if self._needs.topk else None
        self.optimizer.state.clear()
        self.load(weights)

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        for name, p in self.model.model.named_parameters():
            p.copy_(torch.distributed.tensor.distribute_tensor(weights[name], p.device_mesh, p.placements))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(p.detach()) for name, p in self.model.model.named_parameters()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradient, which is then 0."""
        gradients = {name: whole(p.grad) for name, p in self.model.model.named_parameters()}
        self.optimizer.zero_grad()
        return gradients


class Trainer(RegionTrainer):
    policy_worker = ray.remote(num_gpus=1)(Worker)
