"""The improvement bound for the terminal."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from trustrl.tools.audit import percent, table, wrapped

HEADER = ["step", "age", "inside", "max TV ≥", "surrogate", "max form", "sum form", "over", "needs TV", "bound ≤"]
SAYS = {
    "unchanged": "without a change", "improves": "positive", "limits the loss": "that limit the loss",
    "nothing": "that say nothing",
}  # fmt: skip


def text(report: Mapping[str, Any]) -> str:
    """Formats the bound of every update for the terminal."""
    updates = report["updates"]
    several = any(update["update"] for update in updates)
    return "\n".join(
        [
            *wrapped(
                f"{report['sequences']:,} sequences × updates, {report['tokens']:,} tokens × updates; rewards from "
                f"{report['rewards'][0]:g} to {report['rewards'][1]:g}, so ξ = {report['xi']:g}; "
                f"T = {report['horizon']:,}"
            ),
            *wrapped(
                f"μ is {report['anchor']}_logp; δ = {report['ball']['tv']:.3g} in TV, from {report['ball']['source']}"
            ),
            "",
            *table([HEADER, *(_row(update, several) for update in updates)]),
            "",
            *_notes(report),
        ]
    )


def _row(update: Mapping[str, Any], several: bool) -> list[str]:
    published = update["published"]
    return [
        f"{update['step']}.{update['update']}" if several else f"{update['step']}",
        f"{update['age']}",
        percent(update["inside"]),
        _number(update["max_tv"][0]),
        f"{_number(published['surrogate'])}±{_number(published['surrogate_error'], digits=1)}",
        _number(published["max_form"]),
        _number(published["sum_form"]),
        "–" if published["over"] is None else f"{_number(published['over'])}×",
        _number(published["positive_below"]["max_tv"]),
        _number(published["bound"]),
    ]


def _number(x: float | None, digits: int = 2) -> str:
    return "–" if x is None else f"{x:.{digits}g}"


def _notes(report: Mapping[str, Any]) -> list[str]:
    ball, lines = report["ball"], []
    for name, xi in (("published", report["xi"]), ("centered", report["half_range"])):
        counts = Counter(update[name]["says"] for update in report["updates"])
        of = "as published" if name == "published" else "with the middle of the rewards subtracted"
        said = ", ".join(f"{counts[key]} {said}" for key, said in SAYS.items() if counts[key])
        lines += wrapped(f"{len(report['updates'])} updates, bound {of} (ξ = {xi:g}): {said}.")
    kl = "" if ball["kl"] is None else f" (KL ≤ {ball['kl']:g})"
    lines += wrapped(
        f"If every state had TV ≤ {ball['tv']:.3g}{kl}: max form {ball['max_form']:.3g}, sum form at most "
        f"{ball['sum_form']:.3g}. A reward changes by at most {report['rewards'][1] - report['rewards'][0]:g}."
    )
    lines += wrapped(
        "These are estimates, not a guarantee. The max form uses the largest TV that a recorded token proves; other "
        "states may have a larger one. π was trained on the sequences that the surrogate averages."
    )
    if report["truncated_sampling"]:
        lines += wrapped(
            "The sampler excluded tokens (top-p, top-k or min-p): the max form does not hold for such a μ, and the "
            "sum form is estimated too low."
        )
    if report["faulty"] or report["unrewarded"]:
        lines += wrapped(
            f"Left out: {report['faulty']:,} sequences × updates with a faulty token, {report['unrewarded']:,} without "
            "a reward."
        )
    return lines
