"""trustrl: how far a language model may move in one reinforcement-learning update.

The public names are listed once, in `__init__.pyi`: the calls of a trainer and their arguments. Regions, statistics and
corrections are in `trustrl.regions`. Every name is imported when it is first used, so settings, command lines and
`--help` load without torch.
"""

import ast
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _public_names() -> dict[str, str]:
    """Reads the module of each public name from the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {name.name: node.module for node in imports for name in node.names if node.module}


_MODULE_OF = _public_names()
__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]  # it reads the stub


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        module = _MODULE_OF[name]
        value = import_module(f"trustrl.{name}") if module == "trustrl" else getattr(import_module(module), name)
    else:
        value = _moved(name)
    globals()[name] = value
    return value


def _moved(name: str) -> Any:
    """Returns a name that is in `trustrl.regions` since 0.2. Warns once: the caller keeps the value."""
    # Only names that can have moved load the folder of regions: `from trustrl import cli` asks for `cli` first.
    regions = import_module("trustrl.regions") if name[:1].isupper() or name == "register_region" else None
    if regions is None or name not in regions.__all__:
        raise AttributeError(f"module 'trustrl' has no attribute {name!r}")
    warnings.warn(
        f"trustrl.{name} is now trustrl.regions.{name}. The old name will be removed in release 0.3.",
        DeprecationWarning,
        stacklevel=3,
    )
    return getattr(regions, name)


def __dir__() -> list[str]:
    return sorted(__all__)
