"""Public surface as text: each name with its parameters or fields, their defaults, and its public methods.

python scripts/surface.py    writes tests/api/surface.txt and the stub of `trustrl.regions` again
"""

import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import trustrl
from trustrl import regions

STUB = Path(regions.__file__).with_suffix(".pyi")
FILE = Path(__file__).parents[1] / "tests/api/surface.txt"
MODULES = (
    "trustrl", "trustrl.regions", "trustrl.functional", "trustrl.errors", "trustrl.core.divergences",
    "trustrl.recording", "trustrl.tools.audit", "trustrl.world.tasks", "trustrl.world.models",
)  # fmt: skip
"""Modules whose `__all__` is public. They need only the core."""

NAMED = (
    "trustrl.core.diagnostics.Sums", "trustrl.core.metrics.METRICS", "trustrl.core.policy_loss.LossOutput",
    "trustrl.core.records.FullDivergence", "trustrl.core.sampling.within_kept",
    "trustrl.core.token_logprobs.AnchorStates", "trustrl.core.token_logprobs.TokenLogprobs",
    "trustrl.core.token_logprobs.TopLogprobs", "trustrl.core.token_logprobs.VocabShard",
)  # fmt: skip
"""Public names of other modules: results of public functions, and arguments that few users build."""

FIXED = {"trustrl.__version__"}
"""Names whose presence is frozen, not their value."""


def text() -> str:
    """Returns the whole surface: the names of each module in alphabetical order, then the presets."""
    names = [f"{module}.{name}" for module in MODULES for name in public(module)]
    lines = []
    for dotted in (*names, *NAMED):
        module, _, name = dotted.rpartition(".")
        lines += described(dotted, getattr(import_module(module), name))
    lines += [f"preset {name} = {trustrl.preset(name)!r}" for name in trustrl.presets()]
    return "\n".join(lines) + "\n"


def public(module: str) -> list[str]:
    """Returns a module's public names. Plain losses are listed once: in `trustrl.functional`."""
    names = sorted(import_module(module).__all__)
    return [name for name in names if module != "trustrl.regions" or not name.endswith("_loss")]


def stub() -> str:
    """Returns the stub of `trustrl.regions`: type checkers cannot list its folder."""
    lines = STUB.read_text().partition("\n__all__ = ")[0].splitlines()
    # The site follows a star import by the names listed here.
    lines.append(f"__all__ = [{', '.join(json.dumps(name) for name in regions.__all__)}]")
    lines += [f"from {module} import {_exported(names)}" for module, names in regions.OTHERS.items()]
    for module in regions.catalogue():
        if names := sorted([*(region.__name__ for region in regions.classes(module)), *regions.losses(module)]):
            lines.append(f"from {module.__name__} import {_exported(names)}")
    return "\n".join(lines) + "\n"


def _exported(names: Iterable[str]) -> str:
    return ", ".join(f"{name} as {name}" for name in names)


def described(name: str, value: Any) -> Iterator[str]:
    """A head line, then one line for each parameter and method."""
    if inspect.isclass(value) and issubclass(value, Exception):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif inspect.isclass(value):
        yield f"class {name}"
        if not inspect.isabstract(value):
            yield from parameters(value)
        yield from methods(value)
    elif inspect.isfunction(value):
        yield f"def {name}"
        yield from parameters(value)
    else:
        yield name if name in FIXED else f"{name}: {type(value).__name__}"


def parameters(value: Any) -> Iterator[str]:
    """One line for each, with its default; `*` before those that must be named."""
    made = {f.name: f.default_factory for f in fields(value)} if is_dataclass(value) else {}
    named = False
    public = [one for one in inspect.signature(value).parameters.values() if not one.name.startswith("_")]
    for parameter in public:
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            named = True
            yield "    *"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = parameter.default
        if made.get(parameter.name, MISSING) is not MISSING:
            default = made[parameter.name]()
        yield f"    {stars}{parameter.name}" + ("" if default is parameter.empty else f" = {default!r}")


def methods(value: type) -> Iterator[str]:
    """Public methods and properties of the class and of our classes it inherits from."""
    ours = {name for base in value.__mro__ if base.__module__.startswith("trustrl") for name in vars(base)}
    for name in sorted(one for one in ours if not one.startswith("_")):
        member = inspect.getattr_static(value, name)
        if isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            told = [line.strip() for line in parameters(getattr(value, name))]
            yield f"    .{name}({', '.join(one for one in told if one != 'self')})"
        elif isinstance(member, property):
            yield f"    .{name}"


if __name__ == "__main__":
    STUB.write_text(stub())
    FILE.write_text(text())
