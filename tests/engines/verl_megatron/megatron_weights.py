"""One rank of verl's own Megatron worker on gloo: its weights as mbridge exports them, and its log-probs, to a file."""

import json
import os
import sys

import torch
import torch.distributed as dist
from mbridge.core import llm_bridge
from verl import DataProto
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PROMPT = 4


def training_worker(folder, packed=True, kind=TrainingWorker, checkpoint=None, lr=0.0, **parallel):
    engine = McoreEngineConfig(
        dtype="float32", vanilla_mbridge=True, use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=2, use_remove_padding=packed, **parallel,
    )  # fmt: skip
    made = kind(
        config=TrainingWorkerConfig(
            model_type="language_model", model_config=HFModelConfig(path=folder, use_remove_padding=packed),
            engine_config=engine, checkpoint_config=checkpoint,
            optimizer_config=McoreOptimizerConfig(lr=lr, lr_decay_style="constant", total_training_steps=10, lr_decay_steps=10),
        )
    )  # fmt: skip
    made.reset()
    return made


def as_verl_wants(sequences, **meta):
    """Whole sequences, all of whose tokens after the prompt were sampled."""
    rows, length = sequences.shape
    batch = {
        "input_ids": sequences, "prompts": sequences[:, :PROMPT], "responses": sequences[:, PROMPT:],
        "attention_mask": torch.ones_like(sequences), "position_ids": torch.arange(length).repeat(rows, 1),
        "response_mask": torch.ones(rows, length - PROMPT, dtype=torch.long),
    }  # fmt: skip
    usual = {"temperature": 1.0, "global_token_num": [length] * rows}
    return left_right_2_no_padding(DataProto.from_single_dict(batch, meta_info=usual | meta).to_tensordict())


def log_probs(worker, sequences):
    """(B, T − PROMPT) on the rank that has them, else None."""
    data = as_verl_wants(sequences, compute_loss=False)
    out = worker.infer_batch(data)
    return None if out is None else no_padding_2_padding(out["log_probs"], data)


def pad_vocabulary(multiple):
    init = llm_bridge.LLMBridge.__init__

    def padded(self, *args, **kwargs):
        init(self, *args, **kwargs, make_vocab_size_divisible_by=multiple)

    llm_bridge.LLMBridge.__init__ = padded


def exported(worker):
    return {name: weight.detach().clone() for name, weight in worker.engine.get_per_tensor_param()[0]}


def main(folder, out, how):
    dist.init_process_group("gloo")
    if "pad_vocabulary" in how:
        pad_vocabulary(how.pop("pad_vocabulary"))
    worker = training_worker(folder, **how)
    weights = exported(worker)
    logp = log_probs(worker, torch.load(f"{out}-sequences"))
    vocabulary = worker.engine.bridge.padded_vocab_size
    torch.save({"weights": weights, "logp": logp, "vocabulary": vocabulary}, f"{out}-{os.environ['RANK']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
