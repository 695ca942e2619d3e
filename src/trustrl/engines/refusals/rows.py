"""Rows that describe the settings an engine refuses, shared by its start-up check, by plans, and by its docs page.

Imports neither torch nor an engine. The rows of an engine are in the module of that name next to this one, so plans and
the documentation can read them if the engine is not installed. `scripts/refusal_tables.py` writes them to
`docs/engines/`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trustrl.config.axes import Needs, Region
from trustrl.config.sampling_parameters import TRUNCATION
from trustrl.engines.common.region_needs import more_than_sampled_tokens
from trustrl.errors import ConfigError

TRUNCATED = "μ would be renormalized over the kept tokens and π would not. Sample from the whole vocabulary."
PENALISED = "π does not include the penalty that μ was sampled with."
DRAFTS_ON_CPU = (
    "On a CPU, vLLM's speculative decoding reads temperatures that were never set, so it returns NaN log-probs and "
    "draws from other distributions. On a GPU, the check before the first step compares its log-probs with the "
    "trainer's."
)
"""Reasons shared by the rows of several engines."""

Given = Callable[[str, Any], Any]
"""Function that returns a setting's value by its dotted name, or the second argument if it is absent or None."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The regions that a row applies to."""

    words: str
    """The scope as printed in the table."""

    holds: Callable[[Needs], bool]
    """Returns whether a region with these needs is in the scope."""


EVERY = Scope("every region", lambda needs: True)
ON_SAMPLER = Scope("anchored on the sampler", lambda needs: "behavior" in needs.anchors)
ON_TRAINER = Scope("anchored on the trainer", lambda needs: "proximal" in needs.anchors)
VOCABULARY = Scope("Top-K, TROLL, exact", lambda needs: bool(needs.topk or needs.full))
VOCABULARY_OR_TRUNCATED = Scope("Top-K, TROLL, exact, and all with truncated sampling", lambda needs: True)
"""The rows themselves find out whether sampling is truncated."""

SAMPLER_TOPK = Scope("Top-K on the sampler", lambda needs: bool(needs.topk) and needs.anchor == "behavior")
EXACT = Scope("exact divergences", lambda needs: bool(needs.full))
EXACT_ON_SAMPLER = Scope(
    "exact, anchored on the sampler", lambda needs: bool(needs.full) and needs.anchor == "behavior"
)
PER_SEQUENCE = Scope("defined per sequence (GSPO)", lambda needs: needs.reduction is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One setting of an engine that does not work with the regions in `scope`.

    The error reads `<setting> must be <must_be> with a region, got <value>. <why>`. `setting`, `must_be` and `why` may
    contain placeholders: `{region}` is the region's kind, others come from `facts`.
    """

    setting: str
    """The engine's own name for the setting."""

    must_be: str
    """The values that work, in words."""

    why: str
    """The reason, and the fix if `must_be` does not state it. Full sentences."""

    refused: Callable[[Any, Given, Region], bool]
    """Returns whether the value is refused, given the value, all settings, and the region."""

    default: Any = None
    """The value if the setting is absent."""

    scope: Scope = EVERY

    facts: Callable[[Given, Region], Mapping[str, Any]] = lambda lookup, region: {}
    """Returns the values of the placeholders. `got` replaces the value that the error prints."""

    words: Mapping[str, str] = field(default_factory=dict)
    """The text that the table prints for each placeholder."""

    example: Mapping[str, Any]
    """Settings that only this row refuses, relative to settings that work. The test of the row uses them."""

    preset: str = "dppo-binary-tv"
    """The preset that refuses `example`."""

    region: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of that preset."""

    def check(self, lookup: Given, region: Region) -> None:
        """Raises if the settings do not work with the region.

        Raises:
            ConfigError: If the value is refused; names the setting, its value, and the fix.
        """
        if not self.scope.holds(region.needs()):
            return
        got = lookup(self.setting, self.default)
        if self.refused(got, lookup, region):
            facts = {"region": region.kind, "got": got} | dict(self.facts(lookup, region))
            setting, must_be, why = (text.format(**facts) for text in (self.setting, self.must_be, self.why))
            raise ConfigError(f"{setting} must be {must_be} with a region, got {facts['got']!r}. {why}")

    def cells(self) -> tuple[str, str, str, str]:
        """Returns the row of the table: the setting, the values that work, the regions, and the reason."""
        words = {"region": "the region"} | dict(self.words)
        setting, must_be, why = (text.format(**words) for text in (self.setting, self.must_be, self.why))
        if self.why.startswith("{"):
            why = why[:1].upper() + why[1:]
        return setting, must_be, self.scope.words, why


def check(rows: Iterable[Refusal], lookup: Given, region: Region) -> None:
    """Checks every row, in order.

    Raises:
        ConfigError: If a row refuses; the error of the first one.
    """
    for row in rows:
        row.check(lookup, region)


def reader(config: Any) -> Given:
    """Returns a lookup by dotted names in nested mappings or attributes."""

    def given(path: str, default: Any = None) -> Any:
        value = config
        for name in path.split("."):
            value = value.get(name) if hasattr(value, "get") else getattr(value, name, None)
            if value is None:
                return default
        return value

    return given


def other_than(wanted: Any) -> Callable[[Any, Given, Region], bool]:
    """Returns a `Refusal.refused` that allows one value."""
    return lambda got, lookup, region: got != wanted


def is_set(got: Any, lookup: Given, region: Region) -> bool:
    """Refuses every value that counts as true. A `Refusal.refused`."""
    return bool(got)


def fixed(setting: str, must_be: str, why: str, other: Any, default: Any = None) -> Refusal:
    """Returns the row of a setting that must keep its default. `other` is the example's value."""
    return Refusal(
        setting=setting,
        must_be=must_be,
        why=why,
        refused=other_than(default),
        default=default,
        example={setting: other},
    )


def switch(setting: str, why: str, must_be: str = "False") -> Refusal:
    """Returns the row of a switch that must be off."""
    return Refusal(setting=setting, must_be=must_be, why=why, refused=is_set, example={setting: True})


def fitting(reductions: Mapping[str, Any], region: Region) -> list[str]:
    """Returns the names of an engine's averages that work with the region."""
    needed = region.needs().reduction
    return [name for name, reduction in reductions.items() if needed is None or reduction is needed]


def average_per_sequence(
    setting: str, reductions: Mapping[str, Any], fits: str, example: str, default: str | None = None
) -> Refusal:
    """Returns the row of the setting that chooses the average, for regions that allow only some averages.

    Args:
        setting: The engine's setting.
        reductions: The reduction of each of its values.
        fits: The value that works with the example's region.
        example: A value that does not.
        default: The value if the setting is absent.
    """
    return Refusal(
        setting=setting,
        must_be="{fitting}",
        why="{region}'s gradient is defined per sequence.",
        refused=lambda mode, lookup, region: mode not in fitting(reductions, region),
        default=default,
        scope=PER_SEQUENCE,
        facts=lambda lookup, region: {"fitting": " or ".join(fitting(reductions, region))},
        words={"fitting": fits, "region": "GSPO"},
        example={setting: example},
        preset="gspo",
    )


def not_averaged_over_tokens(setting: str, must_be: str) -> Refusal:
    """Returns the row of a switch that averages over tokens."""
    return Refusal(
        setting=setting,
        must_be=must_be,
        why="{region}'s gradient is defined per sequence.",
        refused=is_set,
        scope=PER_SEQUENCE,
        words={"region": "GSPO"},
        example={setting: True},
        preset="gspo",
    )


def table(rows: Iterable[Refusal]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| setting | must be | for regions | why |", "|---|---|---|---|"]
    for row in rows:
        setting, must_be, regions, why = (cell.replace("|", "\\|") for cell in row.cells())
        lines.append(f"| `{setting}` | {must_be} | {regions} | {why} |")
    return "\n".join(lines)


def plain_sampling(group: str) -> dict[str, Refusal]:
    """Returns the rows about vLLM's sampling parameters that change the distribution, by the parameter's name.

    Args:
        group: The engine's group of settings that holds the parameters.
    """
    neutral: dict[str, tuple[float, float, str, Callable[[Any, Given, Region], bool]]] = {
        "top_p": (1.0, 0.9, TRUNCATED, lambda got, lookup, region: TRUNCATION["top_p"](got)),
        "top_k": (-1, 50, TRUNCATED, lambda got, lookup, region: TRUNCATION["top_k"](got)),
        "min_p": (0.0, 0.1, TRUNCATED, lambda got, lookup, region: TRUNCATION["min_p"](got)),
        "repetition_penalty": (1.0, 1.1, PENALISED, other_than(1.0)),
    }
    return {
        name: Refusal(
            setting=f"{group}.{name}",
            must_be=str(default),
            why=why,
            refused=refused,
            default=default,
            example={f"{group}.{name}": example},
        )
        for name, (default, example, why, refused) in neutral.items()
    }


def sampled_only(setting: str, because: str) -> Refusal:
    """Returns the row of an engine that runs only regions of the sampled token.

    Args:
        setting: The engine's setting that names the region.
        because: The reason and the fix, which follow "the region needs ... at each position".
    """
    return Refusal(
        setting=setting,
        must_be="a region of the sampled token",
        why="{region} needs {wanted} at each position, " + because,
        refused=lambda value, lookup, region: True,
        scope=VOCABULARY,
        facts=lambda lookup, region: {"got": region.kind, "wanted": " and ".join(more_than_sampled_tokens(region))},
        words={"region": "It", "wanted": "more of the vocabulary"},
        example={},
        preset="dppo-topk-tv",
    )


def not_asynchronous(setting: str, must_be: str, engine: str, anchored: str) -> Refusal:
    """Returns the row of an asynchronous mode in which an engine does not keep the trainer's policy of the rollout.

    Args:
        setting: The engine's setting of the mode.
        must_be: The value that works.
        engine: The engine's name.
        anchored: The way to write `anchor=behavior` in the engine's settings.
    """
    return Refusal(
        setting=setting,
        must_be=must_be,
        why=f"{{region}} needs the trainer's policy at the rollout's weights, which {engine} does not keep. Use a "
        f"region with {anchored}, which does not need it.",
        refused=is_set,
        default=False,
        scope=ON_TRAINER,
        example={setting: True},
        preset="minirl",
    )
