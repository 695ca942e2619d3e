"""Rows about verl's engines: which ones a region can train with, and how it reads their output layers.

Imports neither torch nor verl.
"""

from collections.abc import Callable
from typing import Any

from trustrl.config.axes import Region
from trustrl.engines.refusals.rows import (
    EXACT,
    EXACT_ON_SAMPLER,
    VOCABULARY,
    VOCABULARY_OR_TRUNCATED,
    Given,
    Refusal,
)
from trustrl.engines.refusals.verl_settings import ACTOR, MAX_KEPT, MEGATRON


def _where_vocabulary_is_read(
    refused: Callable[[Any], bool], on: str | None = None
) -> Callable[[Any, Given, Region], bool]:
    """Returns a `Refusal.refused` for regions that read more than the sampled token, or their log-probs inside it.

    Args:
        refused: Returns whether a value is refused.
        on: The engine's strategy; None for every one.
    """
    return lambda got, lookup, region: (
        refused(got)
        and (VOCABULARY.holds(region.needs()) or lookup(MAX_KEPT, None) is not None)
        and on in (None, lookup(f"{ACTOR}.strategy", None))
    )


def _on_megatron(refused: Callable[[Any], bool]) -> Callable[[Any, Given, Region], bool]:
    return lambda got, lookup, region: refused(got) and lookup(f"{ACTOR}.strategy", None) == "megatron"


ENGINE = (
    Refusal(
        setting=f"{ACTOR}.strategy",
        must_be="fsdp2, fsdp, veomni or megatron",
        why="{region} reads the model's last hidden states and its output layer, which trustrl does not find in other "
        "engines.",
        refused=_where_vocabulary_is_read(lambda strategy: strategy not in ("fsdp2", "fsdp", "veomni", "megatron")),
        default="fsdp",
        scope=VOCABULARY_OR_TRUNCATED,
        example={f"{ACTOR}.strategy": "torchtitan"},
        preset="troll",
    ),
    Refusal(
        setting=f"{MEGATRON}.dynamic_context_parallel",
        must_be="False",
        why="verl then gives each rank other sequences in each micro-batch and returns results on one rank alone, so "
        "anchors and metrics would miss tokens. Use context_parallel_size.",
        refused=_on_megatron(bool),
        default=False,
        example={f"{ACTOR}.strategy": "megatron", f"{MEGATRON}.dynamic_context_parallel": True},
    ),
    *(
        Refusal(
            setting=setting,
            must_be=must_be,
            why=why,
            refused=_where_vocabulary_is_read(refused, on="megatron"),
            default=default,
            scope=VOCABULARY_OR_TRUNCATED,
            example={f"{ACTOR}.strategy": "megatron", setting: example},
            preset="troll",
        )
        for setting, must_be, default, example, refused, why in (
            (
                f"{MEGATRON}.use_megatron_fsdp",
                "False",
                False,
                True,
                bool,
                "{region} reads this rank's part of the output layer, which Megatron-FSDP shards again.",
            ),
            (
                f"{MEGATRON}.override_transformer_config.defer_embedding_wgrad_compute",
                "False",
                False,
                True,
                bool,
                "Megatron would wait for gradients of the output layer that {region} computes itself.",
            ),
            (
                "actor_rollout_ref.model.mtp.enable_train",
                "False",
                False,
                True,
                bool,
                "The output layer must return logits for multi-token prediction, and {region} takes its hidden states.",
            ),
            (
                "actor_rollout_ref.model.lora.target_modules",
                "without output_layer",
                (),
                ["linear_qkv", "output_layer"],
                lambda modules: any("output_layer" in name for name in modules),
                "{region} reads the output layer's weight and would miss the part that an adapter adds.",
            ),
        )
    ),
    Refusal(
        setting="region.anchor",
        must_be="proximal",
        why="{region} needs the anchor's whole distribution, and a sampler records only some of its ids.",
        refused=lambda anchor, lookup, region: True,
        scope=EXACT_ON_SAMPLER,
        facts=lambda lookup, region: {"got": "behavior"},
        example={},
        preset="dppo-full-tv",
    ),
    Refusal(
        setting=f"{ACTOR}.strategy",
        must_be="fsdp2, veomni or megatron",
        why="{region} keeps a copy of the whole output layer, which FSDP1 shards.",
        refused=lambda strategy, lookup, region: strategy not in ("fsdp2", "veomni", "megatron"),
        default="fsdp",
        scope=EXACT,
        example={f"{ACTOR}.strategy": "fsdp"},
        preset="dppo-full-tv",
        region={"anchor": "proximal"},
    ),
    Refusal(
        setting="actor_rollout_ref.model.use_fused_kernels",
        must_be="False",
        why="{region} has its own fused pass, which verl's would replace.",
        refused=_where_vocabulary_is_read(bool),
        default=False,
        scope=VOCABULARY_OR_TRUNCATED,
        example={"actor_rollout_ref.model.use_fused_kernels": True},
        preset="troll",
    ),
)
"""Rows about the engine that trains, and its output layer. Workers check these rows again."""
