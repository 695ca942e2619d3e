"""Models by name: tiny ones trained here, SmolLM2 from PyPI, and whatever a hub or a folder holds.

    trustrl.models.path("tiny")  # a folder for `from_pretrained` and vLLM; made on first use, then cached

No framework is imported before it is used.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from trustrl.errors import MissingDataError, UnknownNameError
from trustrl.registry import Registry, nearest

__all__ = ["MODELS", "local", "path"]

MODELS: Registry[Callable[[], Path]] = Registry("model")
"""How to make or find the folder of each named model."""


@MODELS.register("tiny")
def _tiny() -> Path:
    from trustrl.models.pretrain import Pretraining, pretrained

    return pretrained(Pretraining())


@MODELS.register("tiny-tied")
def _tiny_tied() -> Path:
    from trustrl.models.pretrain import Pretraining, pretrained
    from trustrl.models.tiny import Tiny

    return pretrained(Pretraining(model=Tiny(tied=True)))


@MODELS.register("tiny-long")
def _tiny_long() -> Path:
    return _long("qwen3")


@MODELS.register("tiny-long-llama")
def _tiny_long_llama() -> Path:
    return _long("llama")


def _long(family: Literal["qwen3", "llama"]) -> Path:
    """Adds numbers of twenty digits: answers of 22 tokens, some all but certain, some wrong every seventh time."""
    from trustrl.models.pretrain import Pretraining, pretrained
    from trustrl.models.tiny import Tiny
    from trustrl.tasks import Arithmetic

    unsure = (0.15, 0.01, 0.03, 0.08, 0.005, 0.02, 0.01)
    shape = Tiny(family=family, num_layers=2)
    return pretrained(
        Pretraining(model=shape, task=Arithmetic(digits=20), corrupted=unsure, steps=2800, learning_rate=2e-3)
    )


@MODELS.register("smollm2-135m")
def _smollm2() -> Path:
    from trustrl.models.smollm2 import converted

    return converted()


def path(name: str | os.PathLike[str]) -> str:
    """A folder or hub id that `from_pretrained` and vLLM take.

    A name we know is made on first use and cached. A folder that exists, or anything with a slash, is passed on
    unchanged. A known name means the same wherever it is used: a folder called "tiny" here is "./tiny".

    Raises:
        UnknownNameError: it is none of these.

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
        f"Unknown model {name!r}.{nearest(name, MODELS)} Known: {', '.join(sorted(MODELS))}; "
        "or a folder that exists, or a hub id with a slash, such as 'Qwen/Qwen3-0.6B'."
    )


def local(name: str | os.PathLike[str]) -> str | None:
    """What `path` returns, or None for a known name that would first have to be trained or fetched.

    Raises:
        UnknownNameError: as `path`.
    """
    from trustrl.models import cache

    try:
        with cache.only_kept():
            return path(name)
    except MissingDataError:
        return None
