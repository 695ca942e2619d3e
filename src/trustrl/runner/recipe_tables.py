"""The tables of a recipe: what may be chosen, with its default and its rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trustrl.config import checks
from trustrl.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """[model]: what is trained."""

    name: str
    """A name that `trustrl.models.path` knows, a folder, or a hub id."""

    dtype: str = "float32"
    """Of the trained weights."""

    parameters: int | None = None
    """For the plan's memory alone, where the model is not on this machine."""

    hidden_size: int | None = None
    """For the plan alone."""

    vocab_size: int | None = None
    """For the plan alone."""

    def __post_init__(self) -> None:
        text("model.name", self.name)
        checks.one_of("model.dtype", self.dtype, DTYPES)
        for name in ("parameters", "hidden_size", "vocab_size"):
            if getattr(self, name) is not None:
                checks.whole(f"model.{name}", getattr(self, name), low=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskChoice:
    """[task]: problems and their reward."""

    name: str
    """A name that `trustrl.tasks.load` knows, such as "arithmetic" or "reasoning-gym:chain_sum"."""

    chat: bool = False
    """Whether prompts are worded for a chat model."""

    problems: int = 2000
    """Training problems that prompts are drawn from."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the task."""

    def __post_init__(self) -> None:
        text("task.name", self.name)
        checks.truth("task.chat", self.chat)
        checks.whole("task.problems", self.problems, low=1)
        mapping("task.settings", self.settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """[engine]: who trains, and on what."""

    name: Literal["trl", "verl"]
    """The trainer."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where."""

    nodes: int = 1
    """Machines."""

    ranks_per_node: int = 1
    """Training processes on each of them: GPUs, on GPUs."""

    micro_batch: int | None = None
    """Sequences in one forward pass of a rank; a step's share of the rank unless told."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the engine's own: fields of GRPOConfig, or verl's settings as dotted keys or tables. They win."""

    def __post_init__(self) -> None:
        checks.one_of("engine.name", self.name, ("trl", "verl"))
        checks.one_of("engine.device", self.device, ("cpu", "cuda"))
        checks.whole("engine.nodes", self.nodes, low=1)
        checks.whole("engine.ranks_per_node", self.ranks_per_node, low=1)
        if self.micro_batch is not None:
            checks.whole("engine.micro_batch", self.micro_batch, low=1)
        mapping("engine.settings", self.settings)

    @property
    def ranks(self) -> int:
        """Training processes in all."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """[sampler]: who draws the completions, which makes it the behavior policy."""

    kind: Literal["transformers", "vllm"] = "transformers"
    """transformers samples with the trainer's own network, vLLM with an engine of its own."""

    dtype: str = "float32"
    """Of the sampler; another one than the trainer's is a real mismatch. With transformers on TRL, the model's own."""

    temperature: float = 1.0
    """Of the completions to train on."""

    ranks: int = 1
    """GPUs that share one copy of vLLM's weights (tensor parallel)."""

    def __post_init__(self) -> None:
        checks.one_of("sampler.kind", self.kind, ("transformers", "vllm"))
        checks.one_of("sampler.dtype", self.dtype, DTYPES)
        checks.real("sampler.temperature", self.temperature, rule="a temperature > 0", low=0.0)
        checks.whole("sampler.ranks", self.ranks, low=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimiser:
    """[optimiser]: AdamW's settings."""

    learning_rate: float
    """The highest of the schedule."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it goes on after the warm-up. verl has no linear one."""

    warmup_steps: int = 0
    """Steps it rises for. On verl a multiple of `schedule.updates_per_batch`."""

    weight_decay: float = 0.0
    """Which weights it spares is the engine's choice."""

    max_grad_norm: float = 1.0
    """Longer gradients are shortened to this."""

    def __post_init__(self) -> None:
        checks.real("optimiser.learning_rate", self.learning_rate, rule="a number > 0", low=0.0)
        checks.one_of("optimiser.schedule", self.schedule, ("constant", "linear", "cosine"))
        checks.whole("optimiser.warmup_steps", self.warmup_steps, low=0)
        checks.non_negative("optimiser.weight_decay", self.weight_decay)
        checks.real("optimiser.max_grad_norm", self.max_grad_norm, rule="a length > 0", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """[schedule]: how much is sampled, and how often it is trained on. A step is one update of the weights."""

    steps: int
    """Updates of the weights in all."""

    prompts_per_step: int
    """Problems one update sees."""

    completions_per_prompt: int
    """The group whose rewards are compared."""

    max_prompt_tokens: int
    """Room for a prompt."""

    max_completion_tokens: int
    """Where a completion is cut."""

    updates_per_batch: int = 1
    """Updates from one batch of rollouts: the staleness a region is for."""

    update_sees: Literal["batch", "part"] = "batch"
    """Whether each of these updates sees the whole batch again, or a part of its own. In parts a batch is
    `updates_per_batch` times as large."""

    checkpoint_every: int | None = None
    """Steps between checkpoints, a multiple of `updates_per_batch`: a tenth of the run unless told."""

    seed: int = 0
    """Of problems, samples and shuffles."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "prompts_per_step", "max_prompt_tokens", "max_completion_tokens", "updates_per_batch",
        ):  # fmt: skip
            checks.whole(f"schedule.{name}", getattr(self, name), low=1)
        checks.whole(
            "schedule.completions_per_prompt",
            self.completions_per_prompt,
            low=2,
            advice="Advantages compare the completions of one prompt.",
        )
        checks.whole("schedule.seed", self.seed, low=0)
        checks.one_of("schedule.update_sees", self.update_sees, ("batch", "part"))
        if self.steps % self.updates_per_batch:
            raise ConfigError(
                f"schedule.steps must be a multiple of updates_per_batch, {self.updates_per_batch}, got {self.steps}. "
                "The last batch would be left half used."
            )
        if self.checkpoint_every is not None:
            checks.whole("schedule.checkpoint_every", self.checkpoint_every, low=1)
            if self.checkpoint_every % self.updates_per_batch:
                raise ConfigError(
                    f"schedule.checkpoint_every must be a multiple of updates_per_batch, {self.updates_per_batch}, got "
                    f"{self.checkpoint_every}. Engines keep no rollouts: a run goes on unchanged only between batches."
                )

    @property
    def sequences_per_step(self) -> int:
        """Completions one update sees."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def prompts_per_batch(self) -> int:
        """Problems sampled at once."""
        return self.prompts_per_step * (self.updates_per_batch if self.update_sees == "part" else 1)

    @property
    def save_every(self) -> int:
        """`checkpoint_every`, or its default."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        batches = -(-self.steps // (10 * self.updates_per_batch))
        return batches * self.updates_per_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """[evaluation]: held-out problems, before training, after it, and in between if wanted."""

    count: int = 500
    """Answers to score; where there are fewer held-out problems, some are answered more than once."""

    every: int = 0
    """Steps between evaluations; 0 for before and after alone. On verl a multiple of `schedule.updates_per_batch`."""

    temperature: float = 1.0
    """0 takes the most likely token."""

    def __post_init__(self) -> None:
        checks.whole("evaluation.count", self.count, low=1)
        checks.whole("evaluation.every", self.every, low=0)
        checks.non_negative("evaluation.temperature", self.temperature)


TABLES: dict[str, type] = {
    "model": Model, "task": TaskChoice, "engine": Engine, "sampler": Sampler, "optimiser": Optimiser,
    "schedule": Schedule, "evaluation": Evaluation,
}  # fmt: skip
"""Every table but [region] and [records], which have the settings of regions and of `trustrl.recording.Recording`."""


def text(where: str, value: Any) -> None:
    """Refuses what is no text, or an empty one."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be a text, got {value!r}.")


def folder_name(where: str, value: Any) -> None:
    """Refuses a text that cannot be the name of one directory."""
    text(where, value)
    if value in (".", "..") or any(sign in value for sign in "/\\") or not value.isprintable():
        raise ConfigError(
            f"{where} must be one name without '/', '\\' or control characters, got {value!r}. It names a folder."
        )


def mapping(where: str, value: Any) -> None:
    """Refuses what is no table."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, got {value!r}.")
