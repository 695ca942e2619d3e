"""SkyRL's own policy worker in a Ray actor, with what it takes from a GPU replaced: device, process group, model."""

from typing import Any

import torch
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.backends.skyrl_train.distributed.strategy import DistributedStrategy
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase

from support import regions_oracle as oracle
from trustrl.engines.common import sampled_loss


class PlainStrategy(DistributedStrategy):
    """Backward and nothing else; metrics are reduced by SkyRL's base class."""

    def backward(self, loss, model, optimizer, **kwargs):
        loss.backward()

    def _unused(self, *args, **kwargs):
        raise NotImplementedError

    setup_distributed = optimizer_step = save_checkpoint = load_checkpoint = save_hf_model = _unused


class PlainModel(torch.nn.Module):
    """transformers' model, called and answering as SkyRL's wrapper (which imports flash-attention)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, sequences, num_actions, *, temperature, **unused):
        logits = self.model(sequences).logits / temperature
        logp = logits.log_softmax(-1)
        at_token = logp[:, :-1].gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)
        return at_token[:, -num_actions:], {"entropy": -(logp.exp() * logp).sum(-1).detach()}


class Worker(PolicyWorkerBase):
    """One rank. `__init__` is SkyRL's, and asks its registry for the loss."""

    def init_model(self, folder: str, rendezvous: str) -> None:
        torch.cuda.current_device = lambda: "cpu"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=self._rank, world_size=self._world_size
        )
        self.device_mesh = torch.distributed.init_device_mesh("cpu", (self._world_size,), mesh_dim_names=("dp",))
        self.mesh_rank = MeshRank(
            dp=self._rank, sp=0, tp=0, pp=0, world_size=self._world_size, dp_size=self._world_size, pp_size=1
        )
        self.model = PlainModel(oracle.model_of(folder, oracle.GROWTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.strategy = PlainStrategy()

    def update(self, data: TrainingInputBatch, algorithm: Any) -> dict[str, Any]:
        """SkyRL's `forward_backward` with this loss; its metrics, its gradients, and the verdicts it came to."""
        self.cfg.algorithm = algorithm
        self.policy_loss_fn = ppo_utils.PolicyLossRegistry.get(algorithm.policy_loss_type)
        seen, core = [], sampled_loss.policy_loss

        def watched(policy, rollout, *args, **kwargs):
            out = core(policy, rollout, *args, **kwargs)
            seen.append((out.decision.keep[rollout.in_loss], out.decision.weight[rollout.in_loss]))
            return out

        sampled_loss.policy_loss = watched
        self.model.zero_grad()
        try:
            output = self.forward_backward(data)
        finally:
            sampled_loss.policy_loss = core
        return {
            "loss": repr(self.policy_loss_fn),
            "metrics": output.metrics,
            "gradient": torch.cat([p.grad.flatten() for p in self.model.parameters()]),
            "keep": torch.cat([keep for keep, _ in seen]).tolist(),
            "weight": torch.cat([weight for _, weight in seen]).tolist(),
        }
