"""trustrl: how far a language model may move in one reinforcement-learning update.

The public names are listed once, in `__init__.pyi`, except the settings classes of regions: each is in a file of
`trustrl.regions`. Every name is imported when it is first used, so settings, command lines and `--help` load without
torch.
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
    return {name.name: node.module for node in imports for name in node.names if node.module and name.name != "*"}


_MODULE_OF = _public_names()


def _all() -> list[str]:
    regions = (name for name in import_module("trustrl.regions").__all__ if name[0].isupper())
    return ["__version__", *sorted([*_MODULE_OF, *regions])]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if name == "__all__":
        value = _all()
    elif module == "trustrl":
        value = import_module(f"trustrl.{name}")
    elif module is not None:
        value = getattr(import_module(module), name)
    elif name[:1].isupper() and hasattr(import_module("trustrl.regions"), name):
        value = getattr(import_module("trustrl.regions"), name)
    else:
        raise AttributeError(f"module 'trustrl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_all())
