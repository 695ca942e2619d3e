"""trustrl: how far a language model may move in one reinforcement-learning update.

The public names are listed once, in `__init__.pyi`. Each is imported when it is first used, so settings, command lines
and `--help` load without torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _public_names() -> dict[str, str]:
    """Reads the module of each public name from the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {name.name: node.module for node in imports for name in node.names if node.module}


_MODULE_OF = _public_names()

__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trustrl' has no attribute {name!r}")
    module = _MODULE_OF[name]
    value = import_module(f"trustrl.{name}") if module == "trustrl" else getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
