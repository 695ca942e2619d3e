"""Models by name: tiny models trained on this machine, SmolLM2 from PyPI, and any hub id or directory.

    trustrl.world.models.path("tiny")  # a directory for `from_pretrained` and vLLM; created on first use, then cached

Frameworks are imported on first use.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from trustrl.errors import MissingDataError, UnknownNameError
from trustrl.registry import Registry, nearest

__all__ = ["ARCHITECTURES", "MODELS", "local", "path"]

MODELS: Registry[Callable[[], Path]] = Registry("model")
"""Functions that create or find the directory of each named model."""

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama", "smollm3", "apertus")
"""Architectures with a tiny model `stand-in-<architecture>`, under the names of transformers."""


def _tiny(*, tied: bool = False) -> Path:
    from trustrl.world.models.pretrain import Pretraining, pretrained
    from trustrl.world.models.tiny import Tiny

    return pretrained(Pretraining(model=Tiny(tied=tied)))


def _tiny_long(family: Literal["qwen3", "llama"]) -> Path:
    """Returns a model that adds numbers of twenty digits: answers of 22 tokens, with error rates from 0.5% to 15%."""
    from trustrl.world.models.pretrain import Pretraining, pretrained
    from trustrl.world.models.tiny import Tiny
    from trustrl.world.tasks import Arithmetic

    unsure = (0.15, 0.01, 0.03, 0.08, 0.005, 0.02, 0.01)
    shape = Tiny(family=family, num_layers=2)
    return pretrained(
        Pretraining(model=shape, task=Arithmetic(digits=20), corrupted=unsure, steps=2800, learning_rate=2e-3)
    )


MODELS.register("tiny")(_tiny)
MODELS.register("tiny-tied")(partial(_tiny, tied=True))
MODELS.register("tiny-long")(partial(_tiny_long, "qwen3"))
MODELS.register("tiny-long-llama")(partial(_tiny_long, "llama"))


def _stand_in(architecture: str) -> Path:
    from trustrl.world.models.stand_in import created

    return created(architecture)


for _name in ARCHITECTURES:
    MODELS.register(f"stand-in-{_name}")(partial(_stand_in, _name))


@MODELS.register("smollm2-135m")
def _smollm2() -> Path:
    from trustrl.world.models.smollm2 import converted

    return converted()


def path(name: str | os.PathLike[str]) -> str:
    """Returns a directory or hub id for `from_pretrained` and vLLM.

    A known name is created on first use and cached. An existing directory, or anything with a slash, is returned
    unchanged. A known name takes precedence over a directory: write "./tiny" for a directory called "tiny".

    Raises:
        UnknownNameError: If the name is none of these.

    Example:
        >>> path("Qwen/Qwen3-0.6B")
        'Qwen/Qwen3-0.6B'
    """
    name = os.fspath(name)
    if name in MODELS:
        return str(MODELS[name]())
    if "/" in name or Path(name).is_dir():
        return name
    raise UnknownNameError(
        f"Unknown model {name!r}.{nearest(name, MODELS)} Known: {', '.join(sorted(MODELS))}. "
        "A model can also be an existing directory, or a hub id with a slash, such as 'Qwen/Qwen3-0.6B'."
    )


def local(name: str | os.PathLike[str]) -> str | None:
    """Returns the same as `path`, or None for a known name that is not cached yet.

    Raises:
        UnknownNameError: If `path` raises it.
    """
    from trustrl.world import cache

    try:
        with cache.only_kept():
            return path(name)
    except MissingDataError:
        return None
