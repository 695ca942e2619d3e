"""Tables of a recipe: each setting with its default and its valid values."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trustrl.config import validators
from trustrl.core.metrics import Choice, check_choice
from trustrl.errors import ConfigError
from trustrl.runner.algorithm_tables import Advantage, LoRA, Loss
from trustrl.runner.evaluation_tables import Evaluation
from trustrl.runner.layout import Layout
from trustrl.world.tasks.own_data import DataSet

DTYPES = ("float32", "bfloat16", "float16")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """[model]: the model to train."""

    name: str
    """A name that `trustrl.world.models.path` knows, a directory, or a hub id."""

    dtype: str = "float32"
    """Dtype of the trained weights. FSDP in verl computes in bf16 with float32 weights, too. Half-precision weights
    lose most updates at usual learning rates, except with Megatron, whose optimizer has a float32 copy."""

    architecture: str | None = None
    """Used only for a rehearsal, if the model is not on this machine: "qwen2", "qwen3", "qwen3_moe", "llama",
    "smollm3" or "apertus"."""

    parameters: int | None = None
    """Used only for the plan's memory estimate, if the model is not on this machine."""

    expert_parameters: int | None = None
    """The part of `parameters` that is in experts. Used only for the plan."""

    hidden_size: int | None = None
    """Used only for the plan."""

    vocab_size: int | None = None
    """Used only for the plan."""

    def __post_init__(self) -> None:
        validators.text("model.name", self.name)
        validators.one_of("model.dtype", self.dtype, DTYPES)
        if self.architecture is not None:
            validators.text("model.architecture", self.architecture)
        for name in ("parameters", "expert_parameters", "hidden_size", "vocab_size"):
            if getattr(self, name) is not None:
                validators.whole(f"model.{name}", getattr(self, name), low=1)
        if self.expert_parameters is not None and self.expert_parameters >= (self.parameters or 0):
            raise ConfigError(
                f"model.expert_parameters must be less than model.parameters, {self.parameters}, got "
                f"{self.expert_parameters}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskChoice:
    """[task]: the problems and their reward."""

    name: str
    """A name that `trustrl.world.tasks.load` knows, such as "arithmetic" or "reasoning-gym:chain_sum"."""

    chat: bool = False
    """True if prompts are chat messages."""

    problems: int | None = 2000
    """Number of training problems to draw prompts from. With [data], all of them."""

    settings: dict[str, Any] = field(default_factory=dict)
    """The task's own settings."""

    def __post_init__(self) -> None:
        validators.text("task.name", self.name)
        validators.truth("task.chat", self.chat)
        if self.problems is not None:
            validators.whole("task.problems", self.problems, low=1)
        validators.table("task.settings", self.settings)

    @property
    def label(self) -> str:
        """The name, or the names of the sets of data to train on."""
        tables = self.settings.get("data", ()) if self.name == "data" else ()
        sets = [DataSet(**table) for table in tables]
        return ", ".join(chosen.label for chosen in sets if chosen.use != "held_out") or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """[engine]: the trainer and its hardware."""

    name: Literal["trl", "verl"]
    """The trainer."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The kind of device to train on."""

    nodes: int = 1
    """Number of machines."""

    ranks_per_node: int = 1
    """Training processes per machine. On GPUs, the number of GPUs."""

    micro_batch: int | None = None
    """Sequences in one forward pass of a rank. Defaults to the rank's share of a step."""

    micro_batch_tokens: int | None = None
    """Tokens in one forward pass of a rank on verl, if `micro_batch` is not set. Defaults to verl's."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of GRPOConfig, or verl settings as dotted keys or tables. They override the recipe's other settings."""

    def __post_init__(self) -> None:
        validators.one_of("engine.name", self.name, ("trl", "verl"))
        validators.one_of("engine.device", self.device, ("cpu", "cuda"))
        validators.whole("engine.nodes", self.nodes, low=1)
        validators.whole("engine.ranks_per_node", self.ranks_per_node, low=1)
        if self.micro_batch is not None:
            validators.whole("engine.micro_batch", self.micro_batch, low=1)
        if self.micro_batch_tokens is not None:
            validators.whole("engine.micro_batch_tokens", self.micro_batch_tokens, low=1)
            if self.name == "trl":
                raise ConfigError(
                    f"engine.micro_batch_tokens must be left out on TRL, got {self.micro_batch_tokens}. Set "
                    "engine.micro_batch."
                )
        validators.table("engine.settings", self.settings)

    @property
    def ranks(self) -> int:
        """Total number of training processes."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """[sampler]: the sampler of the completions, which is the behavior policy."""

    kind: Literal["transformers", "vllm"] = "transformers"
    """transformers samples with the trainer's network, vLLM with a separate engine."""

    dtype: str = "float32"
    """Dtype of the sampler. One that differs from the trainer's causes a real mismatch. With transformers on TRL it
    must be the model's."""

    temperature: float = 1.0
    """Sampling temperature of the training completions."""

    ranks: int = 1
    """Tensor-parallel size of vLLM: the number of GPUs that share one copy of its weights."""

    memory_share: float | None = None
    """Share of a GPU's memory for vLLM. Defaults to the engine's choice."""

    def __post_init__(self) -> None:
        validators.one_of("sampler.kind", self.kind, ("transformers", "vllm"))
        validators.one_of("sampler.dtype", self.dtype, DTYPES)
        validators.real("sampler.temperature", self.temperature, rule="a temperature > 0", low=0.0)
        validators.whole("sampler.ranks", self.ranks, low=1)
        if self.memory_share is not None:
            rule = "a share in (0, 1]"
            validators.real("sampler.memory_share", self.memory_share, rule=rule, low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimiser:
    """[optimiser]: settings of AdamW."""

    learning_rate: float
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up. verl does not support "linear"."""

    warmup_steps: int = 0
    """Steps of linear warm-up. On verl a multiple of `schedule.updates_per_batch`."""

    weight_decay: float = 0.0
    """Weight decay. The engine chooses the weights that it applies to."""

    max_grad_norm: float = 1.0
    """Largest gradient norm; longer gradients are clipped."""

    def __post_init__(self) -> None:
        validators.real("optimiser.learning_rate", self.learning_rate, rule="a number > 0", low=0.0)
        validators.one_of("optimiser.schedule", self.schedule, ("constant", "linear", "cosine"))
        validators.whole("optimiser.warmup_steps", self.warmup_steps, low=0)
        validators.non_negative("optimiser.weight_decay", self.weight_decay)
        validators.real("optimiser.max_grad_norm", self.max_grad_norm, rule="a length > 0", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """[schedule]: the amount of sampling and the updates on each batch. A step is one update of the weights."""

    steps: int
    """Total number of updates of the weights."""

    prompts_per_step: int
    """Number of problems in one update."""

    completions_per_prompt: int
    """Size of the group whose rewards are compared."""

    max_prompt_tokens: int
    """Largest prompt, in tokens."""

    max_completion_tokens: int
    """Largest completion, in tokens. Longer ones are truncated."""

    mean_completion_tokens: int | None = None
    """Expected mean length of a completion, in tokens. Used only for the plan. Defaults to `max_completion_tokens`."""

    updates_per_batch: int = 1
    """Updates on one batch of rollouts. More updates make the batch more off-policy."""

    update_sees: Literal["batch", "part"] = "batch"
    """Data of each update: the whole batch again, or a separate part. With "part", a batch is `updates_per_batch` times
    as large."""

    checkpoint_every: int | None = None
    """Steps between checkpoints, a multiple of `updates_per_batch`. Defaults to a tenth of the run."""

    seed: int = 0
    """Seed of problems, samples and shuffles."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "prompts_per_step", "max_prompt_tokens", "max_completion_tokens", "updates_per_batch",
        ):  # fmt: skip
            validators.whole(f"schedule.{name}", getattr(self, name), low=1)
        validators.whole(
            "schedule.completions_per_prompt",
            self.completions_per_prompt,
            low=2,
            advice="Advantages compare the completions of one prompt.",
        )
        if self.mean_completion_tokens is not None:
            validators.whole("schedule.mean_completion_tokens", self.mean_completion_tokens, low=1)
            if self.mean_completion_tokens > self.max_completion_tokens:
                raise ConfigError(
                    "schedule.mean_completion_tokens must be at most max_completion_tokens, "
                    f"{self.max_completion_tokens}, got {self.mean_completion_tokens}. Longer ones are truncated."
                )
        validators.whole("schedule.seed", self.seed, low=0)
        validators.one_of("schedule.update_sees", self.update_sees, ("batch", "part"))
        if self.steps % self.updates_per_batch:
            raise ConfigError(
                f"schedule.steps must be a multiple of updates_per_batch, {self.updates_per_batch}, got {self.steps}. "
                "Otherwise the last batch would be used only in part."
            )
        if self.checkpoint_every is not None:
            validators.whole("schedule.checkpoint_every", self.checkpoint_every, low=1)
            if self.checkpoint_every % self.updates_per_batch:
                raise ConfigError(
                    f"schedule.checkpoint_every must be a multiple of updates_per_batch, {self.updates_per_batch}, got "
                    f"{self.checkpoint_every}. Engines do not save rollouts, so a run can resume only between batches."
                )

    @property
    def sequences_per_step(self) -> int:
        """Number of completions in one update."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def prompts_per_batch(self) -> int:
        """Number of problems sampled at once."""
        return self.prompts_per_step * (self.updates_per_batch if self.update_sees == "part" else 1)

    def completion_tokens(self, sequences: int) -> int:
        """Returns the expected tokens of so many completions, one of which may have the largest length."""
        mean = self.mean_completion_tokens or self.max_completion_tokens
        return max(sequences * mean, self.max_completion_tokens)

    @property
    def save_every(self) -> int:
        """`checkpoint_every`, or its default."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        batches = -(-self.steps // (10 * self.updates_per_batch))
        return batches * self.updates_per_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Logging:
    """[logging]: the metrics that the engine logs, and the tracker that receives them."""

    tracker: Literal["tensorboard", "wandb", "trackio", "mlflow"] | None = None
    """Tracker to log to, in addition to `metrics.jsonl`. Its files go into the run directory."""

    metrics: Choice = "all"
    """"all", or "core" for about eight. Applies to `metrics.jsonl` and to the tracker."""

    def __post_init__(self) -> None:
        if self.tracker is not None:
            validators.one_of("logging.tracker", self.tracker, TRACKERS)
        check_choice(self.metrics, "logging.metrics")


TABLES: dict[str, type] = {
    "model": Model, "task": TaskChoice, "engine": Engine, "layout": Layout, "sampler": Sampler,
    "optimiser": Optimiser, "advantage": Advantage, "loss": Loss, "lora": LoRA, "schedule": Schedule,
    "evaluation": Evaluation, "logging": Logging,
}  # fmt: skip
"""All tables except [region] and [records], which have the settings of regions and `trustrl.recording.Recording`."""


def folder_name(where: str, value: Any) -> None:
    """Raises if the value cannot be the name of a single directory."""
    validators.text(where, value)
    if value in (".", "..") or any(sign in value for sign in "/\\"):
        raise ConfigError(
            f"{where} must be one name without '/', '\\' or control characters, got {value!r}. It names a directory."
        )
