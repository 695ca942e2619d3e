"""TRL's AsyncGRPOTrainer with a region and a real vLLM in this process. See test_async_grpo.py.

Stands in for three parts of TRL that need a GPU: its attention (a FlashAttention 3 kernel), its weight transfer (NCCL)
and the name of the device.
Prints one JSON object per loss and per step.
"""

import json
import queue
import sys
from itertools import pairwise
from pathlib import Path

from trustrl.engines.vllm import set_cpu_environment

if __name__ == "__main__":
    set_cpu_environment()  # before trl imports vllm

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AttentionInterface
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION

import trustrl
from support.tiny_models import save_model
from trustrl.engines.trl.async_trainer import VERSION, TrustRegionAsyncGRPOTrainer
from trustrl_verl_cpu.sampler_server import Limits, Request, buckets
from trustrl_verl_cpu.vllm_server import VLLMServer

GROUP, BATCH, AHEAD = 4, 8, 3


def tree_attention(module, query, key, value, attention_mask, *, tree_kv_index, scaling=None, **tree):
    """What TRL's kernel computes: each segment attends to its path from the root, causally."""
    query, key, value = query[0], key[0][:, tree_kv_index], value[0][:, tree_kv_index]
    key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
    out, ends = [], [tree[f"tree_cu_seqlens_{side}"].tolist() for side in "qk"]
    for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        parts = query[:, a:b], key[:, c:d], value[:, c:d]
        out.append(F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scaling))
    return torch.cat(out, 1).transpose(0, 1).unsqueeze(0), None


class Worker:
    """Rollout worker that samples several batches ahead with vLLM, and keeps a log of what vLLM said."""

    def __init__(self, server):
        self.server, self.version, self.log, self._groups = server, 0, {}, 0
        self.rollout_buffer, self.metrics_queue, self._ready = self, queue.Queue(), []

    def get(self, timeout=None):
        while not self._ready:
            for _ in range(AHEAD * BATCH // GROUP):
                self._ready += self._group()
        return self._ready.pop(0)

    def _group(self):
        self._groups += 1
        prompt = [5 + self._groups % 40, 9, 11]
        answers = self.server._sampled([Request(prompt, 8)] * GROUP)
        rewards = np.array([sum(token % 5 == 0 for token in one.token_ids) for one in answers], float)
        samples = []
        for one, reward in zip(answers, rewards - rewards.mean(), strict=True):
            self.log[tuple(one.log_probs)] = self.version
            samples.append(
                RolloutSample(
                    prompt=[], completion=[], input_ids=np.array(prompt + one.token_ids),
                    completion_mask=np.array([0] * len(prompt) + [1] * len(one.token_ids)),
                    old_log_probs=np.array([0.0] * len(prompt) + one.log_probs), advantage=float(reward),
                    model_version=self.version, group_id=self._groups, metrics={"reward": float(reward)},
                )
            )  # fmt: skip
        return samples

    def qsize(self):
        return len(self._ready)

    def update_model_version(self, version):
        self.version = version

    def start(self):
        pass

    stop = start

    def check_health(self, stale_after_s):
        pass


class Transfer:
    """Weight transfer into the vLLM of this process."""

    def __init__(self, server):
        self.server = server

    def send_weights(self, iterator):
        self.server._begin_weights()
        for bucket in buckets(iterator):
            self.server._load_weights(bucket)
        self.server._end_weights()

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer


class Watched(TrustRegionAsyncGRPOTrainer):
    """Compares what reaches the loss with the worker's log, and the loss with TRL's own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        theirs = {name: x for name, x in inputs.items() if name != VERSION}
        before = {name: list(values) for name, values in self._metrics["train"].items()}
        stock = AsyncGRPOTrainer.compute_loss(self, model, theirs)
        self._metrics["train"].clear()
        self._metrics["train"].update(before)
        weight = self.model.get_output_embeddings().weight
        (wanted,) = torch.autograd.grad(stock, weight)
        loss = super().compute_loss(model, inputs)
        (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
        on = inputs["token_index"] >= 0
        logps, versions, segments = (inputs[name][on] for name in ("old_log_probs", VERSION, "segment_id"))
        exact = []
        for one in segments.unique():
            at = segments == one
            said = {tuple(np.float32(key)): version for key, version in self.rollout_worker.log.items()}
            exact.append([said.get(tuple(logps[at].numpy()))] == versions[at].unique().tolist())
        report = {
            "loss": loss.item(), "stock": stock.item(), "gradient": (found - wanted).abs().max().item(),
            "size": wanted.abs().max().item(), "exact": exact, "ages": (self.model_version - versions).tolist(),
        }  # fmt: skip
        print("LOSS " + json.dumps(report), flush=True)
        return loss


def train(folder, server, path, tokenizer, region):
    trainer = Watched(
        model=str(path),
        reward_funcs=[],
        args=AsyncGRPOConfig(
            output_dir=str(folder / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            max_steps=5, per_device_train_batch_size=BATCH, token_budget=0, max_staleness=9, learning_rate=1e-2,
            save_strategy="no", disable_tqdm=True, num_generations=GROUP, max_completion_length=8,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer,
        rollout_worker=Worker(server),
        weight_transfer=Transfer(server),
        region=region,
        metrics="all",
    )  # fmt: skip
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    trainer.train()
    for log in trainer.state.log_history:
        if "trustrl/tokens" in log:
            print("STEP " + json.dumps({k: v for k, v in log.items() if isinstance(v, float | int)}), flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    path = folder / "model"
    tokenizer = save_model(path, tied=False)
    server = VLLMServer(str(path), Limits(8, 16, 32), batch_size=8, options={"dtype": "float32"})
    server._start()
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA for its name
    for name, given in json.loads(sys.argv[2]).items():
        print("RUN " + json.dumps(name), flush=True)
        train(folder, server, path, tokenizer, trustrl.config_from_dict(given))
