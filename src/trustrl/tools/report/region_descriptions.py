"""Regions and recipes in plain words, with thresholds and their units."""

from collections.abc import Mapping
from typing import Any

from trustrl.config.axes import Region, reads_ages
from trustrl.config.statistics import Statistic
from trustrl.config.terms import TIS, DivergenceGate
from trustrl.regions.words import MEASURES, measure_in_words, number
from trustrl.runs.run import Run, RunSettings


def statistic_of(region: Region | None) -> Statistic | None:
    """Returns the statistic that measures a token's distance, or None if the region has none."""
    for name in ("statistic", "divergence", "ratio", "log_ratio"):
        statistic = getattr(region, name, None)
        if isinstance(statistic, Statistic):
            return statistic
    return None


def unit_of(region: Region | None) -> str | None:
    """Returns the unit of the region's divergence, or None if it has none."""
    statistic = statistic_of(region)
    return None if statistic is None else MEASURES.get(statistic.kind, ("", "the statistic's unit"))[1]


def region_in_words(region: Region | None, plain: Mapping[str, Any], *, observed: bool = False) -> str:
    """Describes in one or two sentences what the region does to a token. Returns an empty text without a region."""
    if region is None and not plain:
        return ""
    if observed:
        return f"Only observed; the engine's own loss trained this run. {region_in_words(region, plain)}"
    if region is None:
        return f"{plain.get('kind', 'no region')}, which is not registered here: {_listed(plain)}."
    text = region.words()
    if not text:
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


def _correction(correction: Any) -> str:
    level = getattr(correction, "level", "token")
    if isinstance(correction, DivergenceGate):
        what, unit = measure_in_words(correction.divergence, "μ")
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
    known = _recipe_facts(run.recipe) if run.recipe else _settings_facts(run.settings)
    return {name: str(value) for name, value in known.items() if value not in (None, "")}


def _recipe_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    def of(table: str, key: str, default: Any = None) -> Any:
        settings = recipe.get(table)
        return settings.get(key, default) if isinstance(settings, Mapping) else default

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
