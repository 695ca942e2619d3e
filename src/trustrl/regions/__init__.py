"""One file per region: equation, settings, decision, presets, words and plain loss. The folder is the list.

`catalogue` imports every file of this folder. A file defines settings classes with a `kind`, and optionally `PRESETS`
(names and factories), `ALIASES` (short names of presets) and functions that end in `_loss`. A file may have presets
alone. No file imports torch when it is loaded; `trustrl.regions.ops` does on first use. `OTHERS` are the public names
that go with regions: statistics, corrections, and what a region of your own needs.

Another package adds regions in the same form by an entry point. Its module is loaded when a kind or a preset is sought
that is not known otherwise, or when presets are listed:

    [project.entry-points."trustrl.regions"]
    log-band = "my_package.log_band"
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trustrl.config.axes import Region
from trustrl.errors import DuplicateNameError, TrustRLWarning

GROUP = "trustrl.regions"
"""Entry points of other packages."""

SHARED = ("base", "loading", "ops", "presets", "recommended", "words")
"""Modules of this folder that regions share."""

OTHERS = {
    "trustrl.config.axes": ("Needs", "PrefixBudget", "Region"),
    "trustrl.config.statistics": (
        "BinaryKL", "BinaryTV", "FullKL", "FullTV", "LogRatio", "Ratio", "SampledK2", "SampledK3", "SequenceRatio",
        "SymmetricBinaryKL", "TopKKL", "TopKTV",
    ),
    "trustrl.config.terms": ("MIS", "TIS", "DivergenceGate", "IcePop"),
    "trustrl.core.clean": ("CleanTokens",),
    "trustrl.core.decision": ("Decision",),
    "trustrl.core.divergences": ("Interval",),
    "trustrl.regions.loading": ("register_region",),
}  # fmt: skip
"""Names by module. Each is imported on first use: the core needs torch, and `loading` imports this module."""

_MODULE_OF = {name: module for module, names in OTHERS.items() for name in names}


@cache
def catalogue() -> tuple[ModuleType, ...]:
    """Returns the modules of all regions in this folder, in alphabetical order."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))
    return tuple(import_module(f"{__name__}.{name}") for name in names if name not in SHARED)


@cache
def installed() -> tuple[ModuleType, ...]:
    """Returns the modules that other packages name as entry points. Warns about one that cannot be loaded."""
    from importlib.metadata import entry_points  # takes as long as all settings together

    modules: list[ModuleType] = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            modules.append(point.load())
        except Exception as error:  # whatever another package raises
            warnings.warn(
                f"The entry point {point.name!r} of {GROUP} must be a module with regions, got {type(error).__name__}: "
                f"{error} from {point.value}. Its regions are left out. Fix or remove that package.",
                TrustRLWarning,
                stacklevel=2,
            )
    return tuple(modules)


def add_installed(add: Callable[[ModuleType], None]) -> None:
    """Calls `add` with each module of other packages. Warns about one whose names are taken, and goes on."""
    for module in installed():
        try:
            add(module)
        except DuplicateNameError as error:
            warnings.warn(
                f"The regions of {module.__name__} must have names that no other region has. {error} Its later regions "
                "are left out.",
                TrustRLWarning,
                stacklevel=2,
            )


def classes(module: ModuleType) -> list[type[Region]]:
    """Returns the settings classes that a region's module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Region) and value.__module__ == module.__name__
    ]


def losses(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Returns the plain losses that a region's module defines, by name."""
    return {name: value for name, value in vars(module).items() if name.endswith("_loss")}


def presets_of(module: ModuleType) -> dict[str, Callable[[], Region]]:
    """Returns a module's presets by name: its `PRESETS`, or each class under its kind."""
    return getattr(module, "PRESETS", {region.kind: region for region in classes(module)})


@cache
def _public() -> dict[str, Any]:
    """Returns the settings classes and plain losses of this folder by name."""
    public: dict[str, Any] = {}
    for module in catalogue():
        public |= {region.__name__: region for region in classes(module)} | losses(module)
    return public


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*_public(), *_MODULE_OF])
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    # Importing a module of this folder asks for its name first, which must not load the folder.
    if (name[:1].isupper() or name.endswith("_loss")) and name in _public():
        return _public()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __getattr__("__all__")
