"""Layout of a run on verl: the training engine, and the way it splits the model and its sequences over ranks."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from trustrl.config import validators
from trustrl.engines.refusals.verl_settings import ACTOR, MEGATRON, ROLLOUT
from trustrl.errors import ConfigError

STRATEGIES = ("fsdp", "fsdp2", "megatron")
VERL_KEYS = {
    "strategy": f"{ACTOR}.strategy",
    "tensor_parallel": f"{MEGATRON}.tensor_model_parallel_size",
    "pipeline_parallel": f"{MEGATRON}.pipeline_model_parallel_size",
    "context_parallel": f"{MEGATRON}.context_parallel_size",
    "expert_parallel": f"{MEGATRON}.expert_model_parallel_size",
    "expert_tensor_parallel": f"{MEGATRON}.expert_tensor_parallel_size",
    "sequence_parallel": f"{MEGATRON}.sequence_parallel",
    "ulysses_parallel": f"{ACTOR}.ulysses_sequence_parallel_size",
    "router_replay": f"{MEGATRON}.router_replay.mode",
}
"""verl's setting for each key of [layout]."""

TRANSFORMER = f"{MEGATRON}.override_transformer_config"
OPTIONAL_SIZES = ("expert_tensor_parallel",)
SIZES = (
    "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", *OPTIONAL_SIZES, "ulysses_parallel",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """[layout]: verl's training engine, and the way it splits the model and its sequences over ranks."""

    strategy: Literal["fsdp", "fsdp2", "megatron"] | None = None
    """verl's training engine. Defaults to verl's own choice: fsdp on GPUs, fsdp2 on CPUs."""

    tensor_parallel: int = 1
    """Megatron: number of ranks that share every layer and the vocabulary."""

    pipeline_parallel: int = 1
    """Megatron: number of stages. Only the last one has the output layer."""

    context_parallel: int = 1
    """Megatron: number of ranks that share every sequence."""

    expert_parallel: int = 1
    """Megatron: number of ranks that share the experts of a layer."""

    expert_tensor_parallel: int | None = None
    """Megatron: number of ranks that share one expert. Defaults to `tensor_parallel`."""

    sequence_parallel: bool = True
    """Megatron: also splits the activations between layers over the tensor-parallel ranks."""

    ulysses_parallel: int = 1
    """FSDP: number of ranks that share every sequence (Ulysses)."""

    router_replay: Literal["disabled", "R2", "R3"] = "disabled"
    """Megatron: R2 replays the experts of the trainer's own recomputation, R3 those of the sampler."""

    recompute: bool = False
    """Megatron: recomputes all activations of every layer in the backward pass. FSDP always does."""

    router_dtype: Literal["float32"] | None = None
    """Megatron: dtype of a mixture of experts' router. Defaults to the model's."""

    def __post_init__(self) -> None:
        validators.truth("layout.recompute", self.recompute)
        if self.router_dtype is not None:
            validators.one_of("layout.router_dtype", self.router_dtype, ("float32",))
        if self.strategy is not None:
            validators.one_of("layout.strategy", self.strategy, STRATEGIES)
        for name in SIZES:
            if name not in OPTIONAL_SIZES or getattr(self, name) is not None:
                validators.whole(f"layout.{name}", getattr(self, name), low=1)
        validators.truth("layout.sequence_parallel", self.sequence_parallel)
        validators.one_of("layout.router_replay", self.router_replay, ("disabled", "R2", "R3"))
        if self.megatron:
            self._check_megatron()
            return
        for name, value in self.chosen().items():
            if VERL_KEYS.get(name, MEGATRON).startswith(MEGATRON):
                raise ConfigError(
                    f"layout.{name} must be left out without Megatron, got {value!r}. Set layout.strategy='megatron'."
                )

    def _check_megatron(self) -> None:
        if self.ulysses_parallel > 1:
            raise ConfigError(
                f"layout.ulysses_parallel must be 1 with Megatron, got {self.ulysses_parallel}. Set "
                "layout.context_parallel to split sequences."
            )
        if self.expert_parallel > 1 and self.tensor_parallel > 1 and not self.sequence_parallel:
            raise ConfigError(
                "layout.sequence_parallel must be true with expert_parallel and tensor_parallel, got false. Megatron "
                "does not train a mixture of experts without it."
            )

    @property
    def megatron(self) -> bool:
        """True if Megatron trains."""
        return self.strategy == "megatron"

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share every sequence."""
        return self.context_parallel * self.ulysses_parallel

    def chosen(self) -> dict[str, Any]:
        """Returns the keys whose values are not the defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    def replicas(self, ranks: int) -> int:
        """Returns the number of copies of the model, each of which trains on its own sequences.

        Under FSDP, ranks that share the weights but not their sequences count as copies.
        """
        model = self.tensor_parallel * self.pipeline_parallel * self.sequence_ranks
        if ranks % model:
            sizes = "tensor_parallel × pipeline_parallel × context_parallel" if self.megatron else "ulysses_parallel"
            raise ConfigError(f"layout.{sizes} must divide the {ranks} ranks, got {model}.")
        experts = self.pipeline_parallel * self.expert_ranks
        if ranks % experts:
            raise ConfigError(
                f"layout.expert_parallel × expert_tensor_parallel × pipeline_parallel must divide the {ranks} ranks, "
                f"got {experts}. expert_tensor_parallel is tensor_parallel by default; 1 keeps every expert whole."
            )
        return ranks // model

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share the experts of one stage."""
        whole = self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel
        return self.expert_parallel * whole

    def verl_settings(self) -> dict[str, Any]:
        """Returns verl's own settings for this layout."""
        settings = {VERL_KEYS[name]: value for name, value in self.chosen().items() if name in VERL_KEYS}
        if self.recompute:
            settings |= {
                f"{TRANSFORMER}.recompute_granularity": "full", f"{TRANSFORMER}.recompute_method": "uniform",
                f"{TRANSFORMER}.recompute_num_layers": 1,
            }  # fmt: skip
        if self.router_dtype is not None:
            settings[f"+{TRANSFORMER}.moe_router_dtype"] = "fp32"
        if self.megatron:
            settings["model_engine"] = "megatron"  # the group of verl's defaults
        if self.ulysses_parallel > 1:
            settings["actor_rollout_ref.model.use_remove_padding"] = True  # verl requires it
        if self.router_replay == "R3":
            settings[f"{ROLLOUT}.enable_rollout_routing_replay"] = True
        return settings
