"""A tiny world for the TRL engine: a model, a micro-batch as TRL's loss gets it, and what both trainers make of it."""

import tempfile
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from support.devices import ON_GPU
from trustrl import regions
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.trl import TrustRegionGRPOTrainer

VOCABULARY, PROMPT, COMPLETION, TOP = 128, 6, 12, 20
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    # Ten times the usual width: log-probs between −10 and 0, as a trained model's, instead of all near log 1/128.
    "initializer_range": 0.2,
}  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory(prefix="trustrl-trl-")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3} | {chr(at): at - 28 for at in range(32, 127)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def tiny_model(config: type = Qwen3Config, kind: type = Qwen3ForCausalLM, *, seed: int = 0, **more: Any) -> Any:
    """A random model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return kind(config(**SHAPE | more))


def settings(**more: Any) -> GRPOConfig:
    """TRL's settings, the same for both trainers."""
    usual = {
        "output_dir": _FOLDER.name, "use_cpu": not ON_GPU, "bf16": False, "gradient_checkpointing": False, "report_to": [],
        "per_device_train_batch_size": 6, "per_device_eval_batch_size": 6, "num_generations": 2,
        "max_completion_length": COMPLETION, "disable_tqdm": True, "save_strategy": "no", "seed": 0,
    }  # fmt: skip
    return GRPOConfig(**usual | more)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 3) for completion in completions]


def trainer_of(cls: type, model: Any, args: GRPOConfig, **more: Any) -> Any:
    """Any GRPO trainer on this world's data, as it is at the start of a step."""
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]})
    if args.beta and not model.config._name_or_path:  # where TRL finds its reference model
        model.save_pretrained(f"{_FOLDER.name}/reference")
        model.config._name_or_path = f"{_FOLDER.name}/reference"
    torch.manual_seed(1)
    trainer = cls(model=model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer(), **more)
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # TRL sets it when training begins
    # accelerate keeps this for the whole process, so it may be another test's.
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    return trainer


def stock(model: Any = None, *, peft_config: Any = None, **more: Any) -> Any:
    """TRL's own trainer."""
    return trainer_of(GRPOTrainer, model or tiny_model(), settings(**more), peft_config=peft_config)


def ours(region: regions.Region, model: Any = None, *, given: dict[str, Any] | None = None, **more: Any) -> Any:
    """Our trainer; `given` are its own arguments beside the region, `more` is TRL's."""
    usual = {"behavior": "trainer", "startup_checks": False, "region": region, "metrics": "all"}
    return trainer_of(TrustRegionGRPOTrainer, model or tiny_model(), settings(**more), **usual | (given or {}))


@torch.no_grad()
def logprobs(model: Any, inputs: dict[str, Any], temperature: float = 1.0) -> Tensor:
    """log π at every completion token over the whole vocabulary, from the model's plain logits: (B, T, V)."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()[:, -length - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def at_sampled(logp: Tensor, inputs: dict[str, Any]) -> Tensor:
    """The sampled tokens' entries, 0 on padding, as TRL keeps them."""
    found = logp.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    return torch.where(inputs["completion_mask"].bool(), found, 0.0)


def sequences(seed: int = 0, rows: int = 6) -> dict[str, Any]:
    """Ragged prompts (padded left) and completions (padded right), advantages of both signs and one 0."""
    g = torch.Generator().manual_seed(seed)
    prompts = torch.tensor([6, 4, 5, 6, 3, 5])[:rows, None]
    lengths = torch.tensor([9, 12, 7, 10, 11, 3])[:rows, None]
    prompt_mask = (torch.arange(PROMPT) >= PROMPT - prompts).int()
    completion_mask = (torch.arange(COMPLETION) < lengths).int()
    return {
        "prompt_ids": torch.randint(4, 120, (rows, PROMPT), generator=g) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(4, 120, (rows, COMPLETION), generator=g) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.3, -0.8, 0.0, 0.6, -1.7, 0.9])[:rows],
    }


def draw(
    model: Any, inputs: dict[str, Any], *, top: int | None = None, temperature: float = 1.0, seed: int = 0
) -> None:
    """Replaces the completions by the model's own, if wanted from its `top` most probable ids only; ends with no EOS."""
    g = torch.Generator().manual_seed(seed)
    ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    for at in range(ids.shape[1]):
        logp = logprobs(model, inputs, temperature)[:, at]
        logp[:, :3] = -torch.inf  # padding and ends
        if top is not None:
            logp = logp.masked_fill(logp < logp.topk(top, dim=-1).values[:, -1:], -torch.inf)
        ids[:, at] = torch.multinomial(logp.exp(), 1, generator=g).squeeze(-1) * mask[:, at]


@torch.no_grad()
def drift(model: Any, width: float, seed: int = 9) -> None:
    """Moves every trained weight by noise: the policy some steps after the rollout."""
    g = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        if p.requires_grad:
            p.add_(width * torch.randn(p.shape, generator=g).to(p.dtype))


def batch(
    model: Any,
    *,
    noise: float = 0.3,
    temperature: float = 1.0,
    steps_per_generation: int = 1,
    tools: bool = False,
    truncated_row: bool = False,
    advantages_per_token: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """One micro-batch as TRL's `_compute_loss` gets it, with what our trainer adds to it.

    The anchors are the model's own distribution with noise on its logits, so that about a third of the tokens lies
    outside the usual clip. The sampler's differs from the trainer's a little more.
    """
    inputs = sequences(seed)
    g = torch.Generator().manual_seed(seed + 1)

    def noisy(logp: Tensor, width: float) -> Tensor:
        return torch.log_softmax(logp + width * torch.randn(logp.shape, generator=g), dim=-1)

    own = logprobs(model, inputs, temperature)
    anchor = noisy(own, noise)
    before, reference, sampler = (at_sampled(x, inputs) for x in (anchor, noisy(own, 0.5), noisy(anchor, 0.3)))
    top = anchor.topk(TOP, dim=-1)
    if truncated_row:  # what `mask_truncated_completions` does to it
        inputs["completion_mask"] = inputs["completion_mask"].clone()
        inputs["completion_mask"][3] = 0
    if tools:
        inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
        inputs["tool_mask"][0, 3:6] = inputs["tool_mask"][1, 0:2] = inputs["tool_mask"][4, 2] = 0
    if advantages_per_token:
        inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(-0.5, 1, COMPLETION)
    in_loss = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    where = TokenPlaces.of_mask(in_loss.bool())
    wide = {"positions": where.column, "topk_ids": where.of(top.indices.int()), "topk_logp": where.of(top.values)}
    return (
        inputs
        | {f"trustrl_{name}": where.split(x) for name, x in wide.items()}
        | {
            "num_items_in_batch": in_loss.sum() * steps_per_generation,
            "old_per_token_logps": before,
            "ref_per_token_logps": reference,
            "sampling_per_token_logps": sampler,
            "importance_sampling_ratio": torch.exp(before - sampler).clamp(max=2.0),
            "trustrl_version": torch.full(before.shape, -1),
            "trustrl_behavior_logp": before,
            "trustrl_proximal_logp": before,
        }
    )


def laid_out(batch: dict[str, Any], name: str, fill: float = 0) -> Tensor:
    """A tensor per sequence that our trainer added to a batch, as (B, T, ...)."""
    where = TokenPlaces.of_columns(batch["trustrl_positions"], batch["completion_ids"].shape)
    x = torch.cat(batch[name])
    return x.new_full((*where.shape, *x.shape[1:]), fill).index_put((where.row, where.column), x)


class Result(NamedTuple):
    """What one call of a trainer's loss gave."""

    loss: float
    gradient: dict[str, Tensor]
    metrics: dict[str, float]
    """What TRL would log now."""


def result(trainer: Any, inputs: dict[str, Any], mode: str = "train") -> Result:
    """Loss, parameter gradients and metrics of one micro-batch."""
    trainer.model.train(mode == "train")
    trainer.model.zero_grad()
    trainer._metrics[mode].clear()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    loss.backward()
    return Result(loss.item(), gradients(trainer), logged(trainer, mode))


def logged(trainer: Any, mode: str = "train") -> dict[str, float]:
    """The mean over what was kept since the last log, as in TRL's `log`."""
    return {name: sum(values) / len(values) for name, values in trainer._metrics[mode].items() if values}


def gradients(trainer: Any) -> dict[str, Tensor]:
    """Every parameter's gradient, in float32."""
    return {name: p.grad.detach().float().clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def spy(monkeypatch: Any) -> list[Any]:
    """Every (LossOutput, PolicyTokens, RolloutTokens) between our trainer and the core, in order."""
    from trustrl.engines.trl import trainer as module

    seen, original = [], module.policy_loss

    def watched(policy: Any, rollout: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((original(policy, rollout, *args, **kwargs), policy, rollout))
        return seen[-1][0]

    monkeypatch.setattr(module, "policy_loss", watched)
    return seen


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """max |a − b| / max |b| over all parameters; the same parameters must have a gradient."""
    assert found.keys() == wanted.keys()
    assert all(x.isfinite().all() for x in found.values())
    largest = max(x.abs().max() for x in wanted.values())
    assert largest > 0
    return (max((found[name] - wanted[name]).abs().max() for name in wanted) / largest).item()
