"""Our trainer and TRL's own, on the same model, settings and batch."""

from typing import Any, NamedTuple

import torch
from peft import LoraConfig

from support import trl_world as world
from trustrl import regions

CLASSIC = regions.Ratio(max_decrease=0.2, max_increase=0.2)
CLIP = regions.PPO(CLASSIC, action="clip")
"""The textbook form, whose loss value is TRL's too; `PPO(CLASSIC)` has the same gradient."""
LORA = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
LARGEST_ERROR = 1e-6


class Case(NamedTuple):
    """What to compare: a region on our side, TRL's settings on theirs."""

    region: regions.Region
    theirs: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    both: dict[str, Any] = {}
    batch: dict[str, Any] = {}


def compared(case: Case, mode: str = "train", model: Any = None) -> tuple[world.Result, world.Result]:
    """(ours, TRL's) on the same weights and batch; stopped and kept tokens on both sides of the anchor."""
    model = model or world.tiny_model
    inputs = world.batch(model(), **case.batch)
    found = world.result(world.ours(case.region, model(), **case.both | case.mine), inputs, mode)
    wanted = world.result(world.stock(model(), **case.both | case.theirs), inputs, mode)
    return found, wanted


def stops_and_keeps(metrics: dict[str, float]) -> bool:
    """Whether the region stopped between 5 % and 60 % of the tokens, on both sides of the anchor."""
    sides = metrics["trustrl/masked_share_increase"], metrics["trustrl/masked_share_decrease"]
    return 0.05 < metrics["trustrl/masked_share"] < 0.6 and min(sides) > 0.02


def adapted(region: regions.Region | None, **more: Any) -> Any:
    """Either trainer with LoRA on the attention layers, its matrices filled alike."""
    made = (
        world.stock(peft_config=LORA, **more)
        if region is None
        else world.ours(region, given={"peft_config": LORA}, **more)
    )
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in sorted(made.model.named_parameters()):
            if "lora" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=g))
    return made
