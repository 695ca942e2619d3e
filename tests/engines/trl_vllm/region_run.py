"""Runs of a few steps of our trainer with a colocated vLLM, one after the other in one process. See test_regions.py.

Prints one JSON object per rollout and per step, and the error of a run that fails.
"""

import json
import sys
import traceback
from pathlib import Path

from trustrl.engines.vllm import set_cpu_environment

if __name__ == "__main__":  # importing this file must change nothing
    set_cpu_environment()  # before trl imports vllm

import torch
from datasets import Dataset
from trl import GRPOConfig

import trustrl
from support.tiny_models import save_model
from support.trl_world import laid_out
from trustrl.engines.common.kept_columns import column_of
from trustrl.engines.trl import TrustRegionGRPOTrainer
from trustrl.recording import Recording, read


class Watched(TrustRegionGRPOTrainer):
    """Holds what was recorded against the trainer's whole distribution at the weights that sampled."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        on = batch["completion_mask"].bool()
        whole, routes = self.forward(batch)
        truth = whole
        sampled = truth.gather(-1, batch["completion_ids"][..., None])[..., 0]
        report = {"step": self.state.global_step, "keys": sorted(k for k in batch if k.startswith("trustrl_"))}
        if "trustrl_kept" in batch:
            truth = inside(whole, batch["trustrl_kept"])
            unrestricted, sampled = sampled, truth.gather(-1, batch["completion_ids"][..., None])[..., 0]
            sizes = torch.cat([torch.from_numpy(column.counts) for column in batch["trustrl_kept"]])
            gap = (batch["trustrl_behavior_logp"] - unrestricted)[on].abs()
            report |= {"gap_without_kept": gap.mean().item(), "kept_mean": sizes.float().mean().item()}
        if "trustrl_behavior_logp" in batch:
            gap = (batch["trustrl_behavior_logp"] - sampled)[on].abs()
            report |= {"gap_mean": gap.mean().item(), "gap_max": gap.max().item()}
        if "trustrl_topk_ids" in batch:
            ids, logp = laid_out(batch, "trustrl_topk_ids", -1).long(), laid_out(batch, "trustrl_topk_logp")
            here = on[..., None] & (ids >= 0) & logp.isfinite()
            gap = (logp - truth.gather(-1, ids.clamp(min=0)))[here].abs()
            report |= {"top_gap_mean": gap.mean().item(), "top_gap_max": gap.max().item(), "k": ids.shape[-1]}
        if self.forget_kept:  # as if nothing had been removed
            whole = [range(self.model.config.vocab_size)]
            batch["trustrl_kept"] = [column_of(whole * len(column.counts)) for column in batch["trustrl_kept"]]
        if "trustrl_experts" in batch:
            layers = len(routes)
            recorded = torch.cat(batch["trustrl_experts"]).unflatten(-1, (layers, -1)).sort(-1).values
            own = torch.stack(routes, -2)[on].sort(-1).values
            report |= {"same_experts": (recorded == own).all(-1).float().mean().item(), "layers": layers}
        print("ROLLOUT " + json.dumps(report), flush=True)
        return batch

    forget_kept = False

    @torch.no_grad()
    def forward(self, batch):
        """The trainer's log-probs at the completion's positions, and each layer's experts there."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        more = {"output_router_logits": True} if "trustrl_experts" in batch else {}
        out = self.model(input_ids=ids, attention_mask=mask, **more)
        at = slice(batch["prompt_ids"].shape[1] - 1, -1)
        k = getattr(self.model.config, "num_experts_per_tok", 0)
        routers = [x.view(*ids.shape, -1)[:, at] for x in out.router_logits] if more else []
        routes = [x.topk(k, -1).indices.to(torch.int16) for x in routers]
        return torch.log_softmax(out.logits[:, at].float() / self.temperature, -1), routes


def inside(logp, columns):
    """The distribution of each token inside its kept set, by a softmax over that set alone."""
    kept = torch.zeros_like(logp, dtype=torch.bool)
    for row, column in enumerate(columns):
        rows = torch.repeat_interleave(torch.arange(len(column.counts)), torch.from_numpy(column.counts).long())
        kept[row, rows, torch.from_numpy(column.ids).long()] = True
    return torch.log_softmax(logp.masked_fill(~kept, -torch.inf), -1)


class SamplerLog:
    """What vLLM answered to each request, by the ids up to each sampled token."""

    def __init__(self, llm):
        self.rows, self.requests, self._generate = {}, 0, llm.generate
        llm.generate = self.generate

    def generate(self, prompts, *args, **more):
        answers = self._generate(prompts, *args, **more)
        for answer in answers:
            for one in answer.outputs:
                if one.logprobs is None:  # the check before the first step scores, and does not sample
                    continue
                self.requests += 1
                ids, logp = one.logprobs.table()
                for t in range(len(ids)):
                    self.rows[*answer.prompt_token_ids, *one.token_ids[: t + 1]] = ids[t].tolist(), logp[t].tolist()
        return answers


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token if m.role == 'assistant' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


class Tools(TrustRegionGRPOTrainer):
    """TRL's own tool loop: the model is random, so every answer is read as a call of the tool."""

    def _generate_and_score_completions(self, inputs):
        before = self.answers.requests
        batch = super()._generate_and_score_completions(inputs)
        compared = different = 0
        top_ids, top_logp = (laid_out(batch, f"trustrl_topk_{name}") for name in ("ids", "logp"))
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        for row, prompt in enumerate(prompts):
            answer = batch["completion_ids"][row].tolist()
            for t in (batch["completion_mask"][row] * batch["tool_mask"][row]).nonzero()[:, 0].tolist():
                ids, logp = self.answers.rows[*prompt, *answer[: t + 1]]
                compared += 1
                different += ids[0] != answer[t] or logp[0] != batch["trustrl_behavior_logp"][row, t].item()
                different += ids[1:] != top_ids[row, t].tolist()
                different += logp[1:] != top_logp[row, t].tolist()
        outside = batch["tool_mask"].eq(0) & batch["completion_mask"].bool()
        report = {
            "requests": self.answers.requests - before, "completions": len(prompts), "compared": compared,
            "different": different, "turns": batch["trustrl_turn"].max().item() + 1,
            "tool_tokens": outside.sum().item(), "turn_of_tools": batch["trustrl_turn"][outside].unique().tolist(),
            "versions": batch["trustrl_version"].unique().tolist(), "step": self.state.global_step,
        }  # fmt: skip
        print("ROLLOUT " + json.dumps(report), flush=True)
        return batch


def train_tools(folder, options):
    from trl.trainer import grpo_trainer

    path = Path(folder) / "model"
    tokenizer = save_model(path, tied=True)
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {}

    def parse(tokenizer, ids, prefix, tools):
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    grpo_trainer.parse_response = parse
    settings = GRPOConfig(
        output_dir=str(Path(folder) / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=4, num_generations=2, num_iterations=2,
        max_steps=4, max_completion_length=130, learning_rate=1e-2, logging_steps=1, disable_tqdm=True,
        save_strategy="no", use_vllm=True, vllm_mode="colocate", vllm_max_model_length=200,
        max_tool_calling_iterations=3, vllm_importance_sampling_correction=False, generation_kwargs={"max_tokens": 6},
    )  # fmt: skip
    trainer = Tools(
        model=str(path), reward_funcs=lambda completions, **_: [float(i % 3) for i, _ in enumerate(completions)],
        args=settings, processing_class=tokenizer, tools=[weather],
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"a{i}+b"}] for i in range(8)]}),
        region=trustrl.config_from_dict(options["region"]), metrics="all", check_sampler_every=0,
        vllm_options={"dtype": "float32", "kv_cache_memory_bytes": 1 << 26},
    )  # fmt: skip
    ALIVE.append(trainer)
    trainer.answers = SamplerLog(trainer.vllm_generation.llm)
    trainer.train()
    report(trainer)


ALIVE = []  # a collected engine would take the process groups of all others with it


def train(folder, options):
    path = Path(folder) / "model"
    tokenizer = save_model(path, tied=options["tied"], experts=options.get("experts", 0))
    region = trustrl.config_from_dict(options["region"])
    settings = GRPOConfig(
        output_dir=str(Path(folder) / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=8, num_generations=4,
        num_iterations=options.get("iterations", 2),
        max_steps=options.get("steps", 4), max_completion_length=8, learning_rate=options.get("lr", 1e-2), logging_steps=1, disable_tqdm=True,
        save_strategy="no", use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64,
        router_aux_loss_coef=0.0 if options.get("experts") else None,
        temperature=options.get("temperature", 1.0), vllm_importance_sampling_correction=options.get("correction", False),
        **options.get("truncation", {}),
    )  # fmt: skip
    trainer = Watched(
        model=str(path),
        reward_funcs=lambda completions, **_: [float(len(text) % 3) + text.count("e") for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [f"a{i}+b" for i in range(16)]}),
        processing_class=tokenizer,
        region=region,
        metrics="all",
        measure_mismatch=options.get("mismatch", False),
        recording=Recording(folder=Path(folder) / "records", sample=1.0, experts=True) if "record" in options else None,
        vllm_options={"dtype": options["dtype"], "kv_cache_memory_bytes": 1 << 26},
        max_kept=options.get("max_kept", 4096),
        check_sampler_every=1,
    )
    ALIVE.append(trainer)
    trainer.forget_kept = options.get("forget_kept", False)
    if options.get("break_sync"):
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    report(trainer)
    if "record" in options:
        print("RECORD " + json.dumps(recorded(Path(folder) / "records")), flush=True)


def report(trainer):
    for log in trainer.state.log_history:
        if "trustrl/tokens" in log:
            print("STEP " + json.dumps({k: v for k, v in log.items() if isinstance(v, float | int)}), flush=True)


def recorded(folder):
    """What the files hold of the routing, and the mismatch that they show at each step's tokens."""
    found = read(folder)
    gap = (found["proximal_logp"] - found["behavior_logp"]).abs()
    experts = found["experts"]
    return {
        "rows": len(gap), "steps": len(found["step"].unique()), "gap_max": gap.max().item(),
        "experts": list(experts.shape), "dtype": str(experts.dtype),
        "lowest": experts.min().item(), "highest": experts.max().item(),
    }  # fmt: skip


if __name__ == "__main__":
    for number, (name, given) in enumerate(json.loads(sys.argv[2]).items()):
        print("RUN " + json.dumps(name), flush=True)
        try:
            (train_tools if given.get("tools") else train)(Path(sys.argv[1]) / str(number), given)
        except Exception:
            print("ERROR " + json.dumps(traceback.format_exc()), flush=True)
