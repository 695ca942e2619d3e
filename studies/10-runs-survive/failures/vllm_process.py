"""Processes of the rows with vLLM, started by `vllm_rows`.

    python -m failures.vllm_process sync NUMBER COMMAND ...    `trustrl COMMAND`, killed at a parameter of a weight sync
    python -m failures.vllm_process server FOLDER ADDRESS      TRL's server mode: eight steps, resumed if possible

TRL sends weights to a server with NCCL, which needs GPUs. Here trustrl's gloo channel sends them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from failures.faults import killed_in

STEPS, SAVE_EVERY = 8, 2
GENERATION = "trl.generation.vllm_generation:VLLMGeneration"


def killed_in_sync(number: int, arguments: list[str]) -> int:
    """Runs a command of `trustrl` that is killed inside a weight sync. 0 kills nothing."""
    from trustrl.engines.vllm import set_cpu_environment

    set_cpu_environment()  # before vllm is imported
    if number:
        sync = "trustrl.engines.vllm.weight_reload:SamplerSync.__call__"
        killed_in(f"{GENERATION}._fix_param_name_to_vllm", number, sync)()
    from trustrl.cli import main

    return main(arguments)


def train_with_server(folder: Path, address: str) -> None:
    """Trains with TRL's server mode, from the newest checkpoint if there is one."""
    import torch
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    import trustrl
    from trustrl.engines.trl import TrustRegionGRPOTrainer
    from trustrl.recording import Recording
    from trustrl.world import models, tasks

    _send_over_gloo(address)
    torch.set_num_threads(1)
    task, model = tasks.load("arithmetic"), models.path("tiny")
    settings = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, use_vllm=True, vllm_mode="server",
        vllm_server_base_url=address, vllm_importance_sampling_correction=False, max_steps=STEPS, logging_steps=1,
        max_completion_length=4, per_device_train_batch_size=16, num_generations=4, learning_rate=5e-4,
        lr_scheduler_type="constant", report_to=[], save_strategy="steps", save_steps=SAVE_EVERY, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = TrustRegionGRPOTrainer(
        model=model, args=settings, train_dataset=task.dataset("train", 64, 0, False), reward_funcs=task.reward,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        region=trustrl.preset("dppo-binary-tv"), behavior="sampler",
        recording=Recording(folder=folder / "records", sample=1.0),
        callbacks=[_logger(folder / "metrics.jsonl")],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)


def _logger(file: Path) -> Any:
    from transformers import TrainerCallback

    class Logger(TrainerCallback):
        """Writes one line per step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                with file.open("a") as opened:
                    opened.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    return Logger()


def _send_over_gloo(address: str) -> None:
    """Replaces the NCCL parts of TRL's client."""
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource

    from trustrl.engines.vllm.clients import ServerClient
    from trustrl.engines.vllm.gloo_transfer import GlooTrainerInitInfo

    senders: list[Any] = []

    def sync(self: Any) -> None:
        if not senders:
            found = GlooTrainerInitInfo(rank=0)
            senders.append(
                WeightTransferTrainerFactory.trainer_init(
                    found, client=ServerClient(address), source=ModuleSource(self.model)
                )
            )
        senders[0].send_weights(str(len(senders)))
        self.vllm_client.reset_prefix_cache()

    VLLMClient.init_communicator = lambda self, device=0: None
    VLLMGeneration.sync_weights = sync


if __name__ == "__main__":
    if sys.argv[1] == "sync":
        sys.exit(killed_in_sync(int(sys.argv[2]), sys.argv[3:]))
    train_with_server(Path(sys.argv[2]), sys.argv[3])
