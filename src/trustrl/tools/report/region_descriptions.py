"""Regions and recipes in plain words, with thresholds and their units."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trustrl.config import regions as settings
from trustrl.config.axes import AnchoredRegion, PrefixBudget, Region, TrustRegion, reads_ages
from trustrl.config.statistics import Divergence, Statistic
from trustrl.config.terms import TIS, DivergenceGate
from trustrl.runs.run import Run, RunSettings

MEASURES = {
    "ratio": ("|π/{b} − 1|", "ratio"),
    "log-ratio": ("|log π/{b}|", "nats"),
    "sequence-ratio": ("|s − 1|, s the geometric mean of π/{b} over the sequence,", "ratio"),
    "sampled-k2": ("½ log² π/{b}", "nats"),
    "sampled-k3": ("π/{b} − 1 − log π/{b}", "nats"),
    "binary-tv": ("|π − {b}| of the sampled token", "probability"),
    "binary-kl": ("the sampled token's binary KL({b}‖π)", "nats"),
    "symmetric-binary-kl": ("the larger of the sampled token's two binary KLs", "nats"),
    "topk-tv": ("TV over the {k} most probable tokens of {b}", "probability"),
    "topk-kl": ("KL({b}‖π) over the {k} most probable tokens of {b}", "nats"),
    "full-tv": ("TV over the whole vocabulary", "probability"),
    "full-kl": ("KL({b}‖π) over the whole vocabulary", "nats"),
}
"""Quantity that each statistic measures, where b is the anchor, and its unit."""


def number(x: float) -> str:
    """Formats a number with four significant digits."""
    return "∞" if x == math.inf else f"{x:.4g}"


def statistic_of(region: Region | None) -> Statistic | None:
    """Returns the statistic that measures a token's distance, or None if the region has none."""
    for name in ("statistic", "divergence", "ratio", "log_ratio"):
        found = getattr(region, name, None)
        if isinstance(found, Statistic):
            return found
    return None


def unit_of(region: Region | None) -> str | None:
    """Returns the unit of the region's divergence, or None if it has none."""
    statistic = statistic_of(region)
    return None if statistic is None else MEASURES.get(statistic.kind, ("", "the statistic's unit"))[1]


def anchor_of(region: Region | None) -> str:
    """Returns the symbol of the region's anchor policy."""
    return "π'" if region is not None and region.needs().anchor == "proximal" else "μ"


def region_in_words(region: Region | None, plain: Mapping[str, Any], *, observed: bool = False) -> str:
    """Describes in one or two sentences what the region does to a token. Returns an empty text without a region."""
    if region is None and not plain:
        return ""
    if observed:
        return f"Only observed; the engine's own loss trained this run. {region_in_words(region, plain)}"
    if region is None:
        return f"{plain.get('kind', 'no region')}, which is not registered here: {_listed(plain)}."
    say = _OWN_WORDS.get(type(region))
    if say is not None:
        text = say(region)
    elif isinstance(region, AnchoredRegion):
        text = _on_axes(region.axes() if not isinstance(region, TrustRegion) else region)
    else:
        return f"{region.kind}: {_listed(plain)}."
    correction = getattr(region, "correction", None)
    if correction is not None:
        text = f"{text} {_correction(correction)}"
    return f"{text}{_staleness(region)}"


def _staleness(region: Region) -> str:
    if not reads_ages(region):
        return ""
    older = f" Tokens older than {region.max_staleness} weight versions"
    return f"{older} are dropped." if region.when_stale == "drop" else f"{older} have a tighter bound."


def _listed(plain: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in plain.items() if key != "kind") or "no settings"


def _measure(statistic: Statistic, b: str) -> tuple[str, str]:
    what, unit = MEASURES.get(statistic.kind, (statistic.kind, "the statistic's unit"))
    return what.format(b=b, k=getattr(statistic, "k", "")), unit


def _bounds(statistic: Statistic) -> str:
    low, high = statistic.bounds
    return number(high) if low == high else f"{number(high)} upwards or {number(low)} downwards"


def _beyond(statistic: Statistic, b: str) -> str:
    what, unit = _measure(statistic, b)
    end = "the upper end of " if isinstance(statistic, Divergence) and statistic.act_on == "upper" else ""
    return f"{end}{what} exceeds {_bounds(statistic)} ({unit})"


def _cap(max_ratio: float | None, b: str) -> str:
    return "" if max_ratio is None else f" Weights π/{b} are capped at {number(max_ratio)}."


def _on_axes(region: TrustRegion) -> str:
    b, statistic = anchor_of(region), region.statistic
    if statistic is None:
        return "Masks nothing; " + (
            f"every token's weight is π/{b}." if region.max_ratio is None
            else f"weights π/{b} are capped at {number(region.max_ratio)}."
        )  # fmt: skip
    if region.action == "penalise":
        what, unit = _measure(statistic, b)
        return f"Masks nothing; reverses the gradient once {what} exceeds {_bounds(statistic)} ({unit})."
    beyond, outward = _beyond(statistic, b), ""
    if region.direction == "away":
        outward = " and the update pushes it further out"
    if isinstance(region.level, PrefixBudget):
        what, unit = _measure(statistic, b)
        text = (
            f"Masks a token once its response has spent its budget of {what}, {_bounds(statistic)} ({unit}),{outward}."
        )
    elif region.level == "token":
        text = f"Masks a token once {beyond}{outward}."
    else:
        over = (
            ""
            if statistic.kind == "sequence-ratio"
            else {"sequence": "mean ", "sequence-max": "largest "}[region.level]
        )
        text = f"Masks a whole sequence once its {over}{beyond}{outward}."
    return text + _cap(region.max_ratio, b)


def _ppo(region: Any) -> str:
    text = _on_axes(region.axes())
    if region.dual_clip is not None:
        text += f" Tokens with a negative advantage are masked above π/μ = {number(region.dual_clip)}."
    if region.relax_below is not None:
        text += f" Tokens with {anchor_of(region)} below {number(region.relax_below)} are never masked."
    return text


def _troll(region: Any) -> str:
    b = anchor_of(region)
    over = "the whole vocabulary" if region.support == "full" else f"the {region.k} most probable tokens of {b}"
    return (
        f"Masks nothing; projects a token's distribution onto KL(π̂‖{b}) ≤ {number(region.bound)} nats over {over}, and "
        f"pulls the network towards it with weight {number(region.alpha)}."
    ) + (f" The weight is the geometric mean of π̂/{b} over the response." if region.level == "sequence" else "")


def _score_centering(region: Any) -> str:
    b, weight = anchor_of(region), region.weight
    over = (
        "the whole vocabulary" if region.support == "full" else f"the {region.k} most probable tokens of {b} and a tail"
    )
    text = f"Masks nothing; subtracts from ∇log π its expectation under {b} over {over}."
    if weight is None:
        return text
    top = number(weight.max_ratio)
    how = f"capped at {top}" if isinstance(weight, TIS) else f"and 0 outside [{number(weight.min_ratio)}, {top}]"
    return f"{text} Both have the weight π/{b}, {how}."


def _trm(region: Any) -> str:
    b = anchor_of(region)
    mean = "" if region.mean is None else f", or its mean {_beyond(region.mean, b)}"
    return f"Drops a whole sequence once its largest {_beyond(region.statistic, b)}{mean}.{_cap(region.max_ratio, b)}"


def _minirl(region: Any) -> str:
    outward = "and the update pushes it further out"
    cap = "" if region.max_ratio is None else f", capped at {number(region.max_ratio)}"
    return f"Masks a token once {_beyond(region.ratio, anchor_of(region))} {outward}; weights are π/μ{cap}."


def _sapo(region: Any) -> str:
    up, down = number(region.temperature_positive), number(region.temperature_negative)
    return (
        f"Masks nothing; a soft gate on π/{anchor_of(region)} reduces weights gradually, with temperature {up} for "
        f"positive advantages and {down} otherwise."
    )


def _gmpo(region: Any) -> str:
    b = anchor_of(region)
    return (
        f"Masks a token once {_beyond(region.log_ratio, b)} and the update pushes it further out. The weight is the "
        f"geometric mean of π/{b} over the response, with log-ratios of masked tokens held at their bound."
    )


def _opsm(region: Any) -> str:
    drop = f"Drops a response with a negative advantage once its mean log μ/π exceeds {number(region.max_drift)} nats."
    if region.statistic is None:
        return drop
    beyond = _beyond(region.statistic, anchor_of(region))
    return f"{drop} Masks a token of the others once {beyond} and the update pushes it further out."


def _vespo(region: Any) -> str:
    return (
        f"Masks nothing; a smooth function of w, the product of π/{anchor_of(region)} over the response, weighs all "
        "its tokens alike. It is 1 at w = 1 and goes to 0 where w is small or large."
    )


def _m2po(region: Any) -> str:
    return (
        f"Masks the tokens with the largest |log π/{anchor_of(region)}| among those that the update pushes further "
        "out, until the mean of its square over the others in the micro-batch is at most "
        f"{number(region.max_second_moment)}."
    )


def _drpo(region: Any) -> str:
    gap = f"|π − {anchor_of(region)}|"
    return f"Masks nothing; reverses the gradient once {gap} exceeds {number(region.width)} (probability)."


_OWN_WORDS: dict[type, Callable[[Any], str]] = {
    settings.PPO: _ppo, settings.TROLL: _troll, settings.TRM: _trm, settings.MiniRL: _minirl, settings.SAPO: _sapo,
    settings.DRPO: _drpo, settings.GMPO: _gmpo, settings.OPSM: _opsm, settings.VESPO: _vespo, settings.M2PO: _m2po,
    settings.ScoreCentering: _score_centering,
}  # fmt: skip


def _correction(correction: Any) -> str:
    level = getattr(correction, "level", "token")
    if isinstance(correction, DivergenceGate):
        what, unit = _measure(correction.divergence, "μ")
        over = "sequence with a mean" if level == "sequence" else "token with a"
        gap = what.replace("π", "π'")
        bound = f"{number(correction.divergence.bounds[0])} ({unit})"
        return f"The mismatch π'/μ multiplies the weight; a {over} divergence above {bound} is dropped: {gap}."
    if isinstance(correction, TIS):
        product = "The product of the mismatch π'/μ over the response" if level != "token" else "The mismatch π'/μ"
        return f"{product} multiplies the weight, up to {number(correction.max_ratio)}."
    over = {"sequence-mean": "sequence with a mean", "sequence-product": "sequence with a product of the"}
    over = over.get(level, "token with a")
    band = f"[{number(correction.min_ratio)}, {number(correction.max_ratio)}]"
    return f"The mismatch π'/μ multiplies the weight; a {over} mismatch outside {band} is dropped."


FACT_LABELS = {"a step": "batch", "updates a batch": "updates per batch"}
"""Names of facts that reports show differently from `--json`."""

_PROPER = {"trl": "TRL", "vllm": "vLLM", "skyrl": "SkyRL"}


def facts(run: Run) -> dict[str, str]:
    """Returns short facts about a run by name, omitting those that its files do not contain."""
    found = _recipe_facts(run.recipe) if run.recipe else _settings_facts(run.settings)
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def _recipe_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    def of(table: str, key: str, default: Any = None) -> Any:
        found = recipe.get(table)
        return found.get(key, default) if isinstance(found, Mapping) else default

    ranks, device = (of("engine", "nodes") or 1) * (of("engine", "ranks_per_node") or 1), of("engine", "device")
    prompts, completions = of("schedule", "prompts_per_step"), of("schedule", "completions_per_prompt")
    return {
        "model": _joined(of("model", "name"), of("model", "dtype")),
        "task": of("task", "name"),
        "engine": _joined(_PROPER.get(of("engine", "name"), of("engine", "name")), device and f"{ranks} × {device}"),
        "sampler": _joined(_PROPER.get(of("sampler", "kind"), of("sampler", "kind")), of("sampler", "dtype")),
        "a step": prompts and f"{prompts} × {completions} completions",
        "updates a batch": of("schedule", "updates_per_batch"),
        "learning rate": of("optimiser", "learning_rate"),
        "seed": of("schedule", "seed"),
    }


def _settings_facts(settings: RunSettings) -> dict[str, Any]:
    engine = _PROPER.get(settings.engine or "", settings.engine)
    version = f" {settings.engine_version}" if settings.engine_version else ""
    sampling = [("temperature", settings.temperature), ("top-p", settings.top_p), ("top-k", settings.top_k)]
    return {
        "model": _joined(settings.model, settings.trainer_dtype),
        "task": settings.task,
        "engine": engine and f"{engine}{version}",
        "loss": settings.loss,
        "sampler": settings.sampler_dtype,
        "sampling": _joined(*(f"{name} {value}" for name, value in sampling if value is not None)),
        "completions per prompt": settings.completions_per_prompt,
        "updates a batch": settings.updates_per_batch,
        "learning rate": settings.learning_rate,
        "seed": settings.seed,
    }


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part is not None)
