"""One rank of a real verl training worker (FSDP2, no Ray): the gradients of two losses on the same tokens, to a file."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import verl_world as world
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

VOCABULARY, PROMPT, RESPONSE, ROWS = 64, 4, 12, 6


def tiny_model(folder: str) -> str:
    """Random weights, wide enough for log-probs as different as a trained model's."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "initializer_range": 0.2, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


def training_worker(folder: str) -> TrainingWorker:
    engine = FSDPEngineConfig(
        strategy="fsdp2", fsdp_size=-1, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, use_torch_compile=False,
        infer_micro_batch_size_per_gpu=ROWS, use_remove_padding=False, forward_only=False,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )  # fmt: skip
    model = HFModelConfig(
        path=folder, use_remove_padding=False, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )  # fmt: skip
    made = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, checkpoint_config=None,
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10),
        )
    )  # fmt: skip
    made.reset()
    return made


def tokens(rank: int) -> dict[str, torch.Tensor]:
    """Each rank's own; the last one has a micro-batch without a single token in the loss."""
    torch.manual_seed(10 + rank)
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + RESPONSE))
    lengths = torch.randint(3, RESPONSE + 1, (ROWS,))
    response = (torch.arange(RESPONSE) < lengths.unsqueeze(1)).long()
    attention = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), response], dim=1)
    in_loss = response.clone()
    if rank == dist.get_world_size() - 1:
        in_loss[:2] = 0
    return {
        "input_ids": ids, "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": attention,
        "position_ids": torch.arange(PROMPT + RESPONSE).repeat(ROWS, 1), "response_mask": in_loss,
    }  # fmt: skip


def as_verl_wants(batch: dict[str, torch.Tensor], **meta) -> object:
    usual = {"temperature": 1.0, "global_token_num": batch["attention_mask"].sum(-1).tolist()}
    return left_right_2_no_padding(DataProto.from_single_dict(dict(batch), meta_info=usual | meta).to_tensordict())


def gradient_of(worker: TrainingWorker, loss_mode: str, batch: dict[str, torch.Tensor], mode: str, **more) -> dict:
    """One optimiser step at learning rate 0, and the gradient it would have used."""
    config = world.actor(loss_mode, loss_agg_mode=mode, **more)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    kept = []
    step = type(worker.engine).optimizer_step

    def watched() -> object:
        kept.append(torch.cat([p.grad.full_tensor().flatten() for p in worker.engine.module.parameters()]))
        return step(worker.engine)

    worker.engine.optimizer_step = watched
    rows = ROWS * dist.get_world_size()
    out = worker.train_mini_batch(
        as_verl_wants(
            batch, global_batch_size=rows, mini_batch_size=rows, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}
        )
    )
    (gradient,) = kept
    return {"gradient": gradient, "metrics": tu.get(out, "metrics") if out is not None else None}


def main(out: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")  # verl would ask for two backends, and both would be the CPU's
    folder = f"{out}-model-{rank}"
    worker = training_worker(tiny_model(folder))
    batch = tokens(rank)
    scored = as_verl_wants(batch, compute_loss=False)
    logp = no_padding_2_padding(worker.infer_batch(scored)["log_probs"], scored)
    batch["old_log_probs"] = (logp + 0.5 * torch.randn_like(logp)).clamp(max=-1e-4)
    batch["advantages"] = torch.randn(ROWS, 1).expand(ROWS, RESPONSE).contiguous()
    region = {"divergence": {"max_decrease": 0.01, "max_increase": 0.02}}
    bounds = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1e6}
    found = {}
    for mode in world.MODES:
        found[mode] = (
            gradient_of(worker, "trustrl-dppo-binary-tv", batch, mode, policy_loss={"region": region}),
            gradient_of(worker, "dppo_tv", batch, mode, **bounds),
        )
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
