"""axolotl's GRPO trainer with a region, chosen in the YAML file.

Seams:    `trainer_cls`, and a plugin for the settings. axolotl calls a class from a plugin's `get_trainer_cls` without
          the model and the reward functions, so the plugin does not return one
Switch:   `plugins: [trustrl.engines.axolotl.TrustRegionPlugin]`, `trainer_cls:
          trustrl.engines.axolotl.TrustRegionTrainer`, and `trust_region: dppo-binary-tv-capped`
Borrowed: everything else, from axolotl's trainer and, through `trustrl.engines.trl`, from TRL's
"""

import inspect
from collections.abc import Mapping
from typing import Any

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer  # pyright: ignore[reportMissingImports]
from axolotl.integrations.base import BasePlugin, PluginManager  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel, model_validator

from trustrl.engines.common.region_settings import region_given
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.axolotl import ROWS, TRAINER
from trustrl.engines.trl import TrustRegionMixin
from trustrl.errors import ConfigError, EngineError
from trustrl.recording import Recording
from trustrl.registry import nearest

PLUGIN = "trustrl.engines.axolotl.TrustRegionPlugin"
OPTIONS = [
    name
    for name, parameter in inspect.signature(TrustRegionMixin.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "region"
]
"""The settings in `trust_region_options`: the arguments of `TrustRegionMixin`."""


class TrustRegionArgs(BaseModel):
    """The settings that the plugin adds to axolotl's YAML file."""

    trust_region: Any = None
    """A preset's name, or a mapping with `preset` or `kind`; see `region_given`."""

    trust_region_options: dict[str, Any] | None = None
    """Arguments of `TrustRegionMixin`. `recording` is a mapping of the settings of `trustrl.recording.Recording`."""

    @model_validator(mode="before")
    @classmethod
    def check_trust_region(cls, data: Any) -> Any:
        """Checks all settings that a region depends on, before axolotl loads a model."""
        if PLUGIN in (data.get("plugins") or []):  # axolotl keeps the plugins of earlier files in the same process
            rows.check(ROWS, rows.reader(data), trainer_arguments(data)["region"])
        return data


class TrustRegionPlugin(BasePlugin):
    """Plugin that reads `trust_region` and checks that the trainer applies it."""

    def get_input_args(self) -> str:
        """Returns the name of the class with the plugin's settings."""
        return f"{TrustRegionArgs.__module__}.{TrustRegionArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Checks the trainer's class. Another plugin may have replaced the one that the file names.

        Raises:
            EngineError: If the trainer has no region.
        """
        if not isinstance(trainer, TrustRegionMixin):
            raise EngineError(
                f"The trainer must be {TRAINER} or a subclass, got {type(trainer).__name__}. Set trainer_cls, and "
                "remove plugins that bring their own trainer."
            )


class TrustRegionTrainer(TrustRegionMixin, AxolotlGRPOTrainer):
    """axolotl's GRPO trainer with a trust region instead of the clip.

    Takes the region from the YAML file, or from the argument `region` if axolotl's command line does not create it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Creates a trainer with the region of the YAML file that axolotl runs.

        Raises:
            ConfigError: If the file does not list the plugin, or a setting does not work with the region.
        """
        super().__init__(*args, **({} if "region" in kwargs else _of_running_file()), **kwargs)


def trainer_arguments(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `TrustRegionMixin` that the settings describe.

    Args:
        cfg: axolotl's settings.

    Raises:
        ConfigError: If a setting has another form, or is unknown.
        UnknownNameError: If no preset has the region's name.
    """
    region = region_given(_plain(cfg.get("trust_region")), "trust_region")
    options = _plain(cfg.get("trust_region_options")) or {}
    for name in options:
        if name not in OPTIONS:
            hint = nearest(name, OPTIONS)
            raise ConfigError(f"trust_region_options has no setting {name!r}.{hint} It has: {', '.join(OPTIONS)}.")
    if options.get("recording") is not None:
        options = {**options, "recording": Recording.of(options["recording"])}
    return {"region": region, **options}


def _of_running_file() -> dict[str, Any]:
    cfg = PluginManager.get_instance().cfg or {}
    plugins = cfg.get("plugins") or []
    if PLUGIN not in plugins:
        raise ConfigError(f"plugins must contain {PLUGIN} with trainer_cls={TRAINER}, got {list(plugins)!r}.")
    return trainer_arguments(cfg)


def _plain(value: Any) -> Any:
    """Returns plain dictionaries: axolotl's own return None for a missing key."""
    return value.to_dict() if hasattr(value, "to_dict") else value
