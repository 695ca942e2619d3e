"""Rows that describe the settings an engine refuses, shared by its start-up check, by plans, and by its docs page.

Imports neither torch nor an engine. The rows of an engine are in the module of that name next to this one, so plans and
the documentation can read them if the engine is not installed. `scripts/refusal_tables.py` writes them to
docs/reference/refused-settings.md.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trustrl.config.axes import Needs, Region, reads_ages
from trustrl.config.sampling_parameters import TRUNCATION
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
ON_TRAINER_ALONE = Scope("anchored on the trainer alone", lambda needs: "behavior" not in needs.anchors)
VOCABULARY = Scope("Top-K, TROLL, exact", lambda needs: bool(needs.topk or needs.full))
VOCABULARY_OR_TRUNCATED = Scope("Top-K, TROLL, exact, and all with truncated sampling", lambda needs: True)
"""The rows themselves find out whether sampling is truncated."""

SAMPLER_TOPK = Scope("Top-K on the sampler", lambda needs: bool(needs.topk) and needs.anchor == "behavior")
EXACT = Scope("exact divergences", lambda needs: bool(needs.full))
EXACT_ON_SAMPLER = Scope(
    "exact, anchored on the sampler", lambda needs: bool(needs.full) and needs.anchor == "behavior"
)
AGES = Scope("with max_staleness", lambda needs: True)
"""The rows themselves find out whether the region has it."""

PER_SEQUENCE = Scope("defined per sequence (GSPO)", lambda needs: needs.reduction is not None)


@dataclass(frozen=True, slots=True)
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

    default: Any = None
    """The value if the setting is absent."""

    refused: Callable[[Any, Given, Region], bool] | None = None
    """Returns whether the value is refused, given the value, all settings, and the region. None allows only the
    default."""

    scope: Scope = EVERY

    facts: Callable[[Given, Region], Mapping[str, Any]] = lambda lookup, region: {}
    """Returns the values of the placeholders. `got` replaces the value that the error prints."""

    words: Mapping[str, str] = field(default_factory=dict)
    """The text that the table prints for each placeholder."""

    def check(self, lookup: Given, region: Region) -> None:
        """Raises if the settings do not work with the region."""
        if not self.scope.holds(region.needs()):
            return
        got = lookup(self.setting, self.default)
        if got != self.default if self.refused is None else self.refused(got, lookup, region):
            facts = {"region": region.kind, "got": got} | dict(self.facts(lookup, region))
            setting, must_be, why = (text.format(**facts) for text in (self.setting, self.must_be, self.why))
            raise ConfigError(f"{setting} must be {must_be} with a region, got {facts['got']!r}. {why}")


def check(rows: Iterable[Refusal], lookup: Given, region: Region) -> None:
    """Checks every row, in order.

    Raises:
        ConfigError: If a row refuses; the error of the first one.
    """
    for row in rows:
        row.check(lookup, region)


def reader(config: Any, **facts: Any) -> Given:
    """Returns a lookup of `facts`, and by dotted names in nested mappings or attributes of `config`."""

    def given(path: str, default: Any = None) -> Any:
        if path in facts:
            return default if facts[path] is None else facts[path]
        value = config
        for name in path.split("."):
            value = value.get(name) if hasattr(value, "get") else getattr(value, name, None)
            if value is None:
                return default
        return value

    return given


def always(got: Any, lookup: Given, region: Region) -> bool:
    """Refuses every value, so that `Refusal.scope` decides alone. A `Refusal.refused`."""
    return True


def is_set(got: Any, lookup: Given, region: Region) -> bool:
    """Refuses every value that counts as true. A `Refusal.refused`."""
    return bool(got)


def unfit(setting: str, must_be: str, why: str, scope: Scope, **more: Any) -> Refusal:
    """Returns the row of regions that an engine cannot feed. The error prints the region's kind.

    Args:
        setting: The engine's setting that names the region.
        must_be: The regions that work, in words.
        why: The reason and the fix.
        scope: The regions that do not work.
        more: Other fields of the row.
    """
    facts = {"facts": lambda lookup, region: {"got": region.kind}}
    return Refusal(setting, must_be, why, scope=scope, **{"refused": always, **facts, **more})


def no_exact(setting: str) -> Refusal:
    """Returns the row of exact divergences, for engines without the rollout's hidden states."""
    why = "The adapter does not keep the rollout's hidden states. TRL and verl support exact divergences."
    return unfit(setting, "Top-K or on the sampled token", why, EXACT)


def no_topk_of_sampler(setting: str, why: str, **more: Any) -> Refusal:
    """Returns the row of Top-K regions on the sampler, for engines that record only the sampled token's log-prob."""
    return unfit(setting, "on the sampled token, or anchored on the trainer,", why, SAMPLER_TOPK, **more)


def no_ages(setting: str, engine: str) -> Refusal:
    """Returns the row of regions that read the ages of tokens, for engines that record no versions."""
    why = f"{engine} does not record which weights sampled a token. TRL, verl and OpenRLHF do."
    return unfit(setting, "without max_staleness", why, AGES, refused=lambda got, lookup, region: reads_ages(region))


def switch(setting: str, why: str, must_be: str = "False", **more: Any) -> Refusal:
    """Returns the row of a switch that must be off. `more` has other fields of the row."""
    return Refusal(setting, must_be, why, refused=is_set, **more)


def at_most(setting: str, largest: int, why: str, **more: Any) -> Refusal:
    """Returns the row of a number with an upper bound, which is also its value if the setting is absent.

    Args:
        setting: The engine's setting.
        largest: The largest value that works. 0 and 1, for images and ranks, have no smaller one.
        why: The reason and the fix.
        more: Other fields of the row.
    """
    must_be = str(largest) if largest < 2 else f"at most {largest}"
    return Refusal(setting, must_be, why, largest, lambda got, lookup, region: got > largest, **more)


def fitting(reductions: Mapping[str, Any], region: Region) -> list[str]:
    """Returns the names of an engine's averages that work with the region."""
    needed = region.needs().reduction
    return [name for name, reduction in reductions.items() if needed is None or reduction is needed]


def average_per_sequence(
    setting: str,
    reductions: Mapping[str, Any],
    fits: str,
    default: str | None = None,
    why: str = "{region}'s gradient is defined per sequence.",
    written: Callable[[str], str] = str,
) -> Refusal:
    """Returns the row of the setting that chooses the average, for regions that allow only some averages.

    Args:
        setting: The engine's setting.
        reductions: The reduction of each of its values.
        fits: The value that the table prints.
        default: The value if the setting is absent.
        why: The reason.
        written: Returns a value as errors print it.
    """
    return Refusal(
        setting,
        must_be="{fitting}",
        why=why,
        default=default,
        refused=lambda mode, lookup, region: mode not in fitting(reductions, region),
        scope=PER_SEQUENCE,
        facts=lambda lookup, region: {"fitting": " or ".join(map(written, fitting(reductions, region)))},
        words={"fitting": fits, "region": "GSPO"},
    )


def not_averaged_over_tokens(setting: str, must_be: str) -> Refusal:
    """Returns the row of a switch that averages over tokens."""
    why = "{region}'s gradient is defined per sequence."
    return switch(setting, why, must_be, scope=PER_SEQUENCE, words={"region": "GSPO"})


def whole_vocabulary(
    setting: str, parameter: str, must_be: str, default: float | None = None, why: str = TRUNCATED
) -> Refusal:
    """Returns the row of a sampling parameter that must not truncate.

    Args:
        setting: The engine's name for it.
        parameter: vLLM's name for it: top_p, top_k or min_p.
        must_be: The value that keeps the whole vocabulary, in words.
        default: The value if the setting is absent.
        why: The reason and the fix.
    """
    return Refusal(
        setting,
        must_be,
        why,
        default,
        refused=lambda got, lookup, region: got is not None and TRUNCATION[parameter](got),
    )


def plain_sampling(group: str, why: str = TRUNCATED) -> tuple[Refusal, ...]:
    """Returns the rows about vLLM's sampling parameters that change the distribution.

    Args:
        group: The engine's group of settings that holds the parameters.
        why: The reason of those that truncate.
    """
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    rows = (whole_vocabulary(f"{group}.{name}", name, str(value), value, why) for name, value in neutral.items())
    return (*rows, no_penalty(f"{group}.repetition_penalty"))


EVERY_TOKEN = Refusal(
    "top_entropy_quantile",
    "1.0",
    "Regions on a subset of tokens are not supported.",
    1.0,
    refused=lambda got, lookup, region: got < 1.0,
)
"""The row of TRL's setting for a loss on some of the tokens, which trainers that derive from TRL's share."""


def no_penalty(setting: str) -> Refusal:
    """Returns the row of a repetition penalty."""
    return Refusal(setting, "1.0", PENALISED, 1.0)


def not_asynchronous(setting: str, must_be: str, engine: str, anchored: str) -> Refusal:
    """Returns the row of an asynchronous mode in which an engine does not keep the trainer's policy of the rollout.

    Args:
        setting: The engine's setting of the mode.
        must_be: The value that works.
        engine: The engine's name.
        anchored: The way to write `anchor=behavior` in the engine's settings.
    """
    why = (
        f"{{region}} needs the trainer's policy at the rollout's weights, which {engine} does not keep. Use a region "
        f"with {anchored}, which does not need it."
    )
    return switch(setting, why, must_be, scope=ON_TRAINER)
