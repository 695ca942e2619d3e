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


def text(found: Mapping[str, Any]) -> str:
    """Formats the bound of every update for the terminal."""
    updates = found["updates"]
    several = any(one["update"] for one in updates)
    return "\n".join(
        [
            *wrapped(
                f"{found['sequences']:,} sequences × updates, {found['tokens']:,} tokens × updates; rewards from "
                f"{found['rewards'][0]:g} to {found['rewards'][1]:g}, so ξ = {found['xi']:g}; T = {found['horizon']:,}"
            ),
            *wrapped(
                f"μ is {found['anchor']}_logp; δ = {found['ball']['tv']:.3g} in TV, from {found['ball']['source']}"
            ),
            "",
            *table([HEADER, *(_row(one, several) for one in updates)]),
            "",
            *_notes(found),
        ]
    )


def _row(one: Mapping[str, Any], several: bool) -> list[str]:
    at = one["published"]
    return [
        f"{one['step']}.{one['update']}" if several else f"{one['step']}",
        f"{one['age']}",
        percent(one["inside"]),
        _number(one["max_tv"][0]),
        f"{_number(at['surrogate'])}±{_number(at['surrogate_error'], digits=1)}",
        _number(at["max_form"]),
        _number(at["sum_form"]),
        "–" if at["over"] is None else f"{_number(at['over'])}×",
        _number(at["positive_below"]["max_tv"]),
        _number(at["bound"]),
    ]


def _number(x: float | None, digits: int = 2) -> str:
    return "–" if x is None else f"{x:.{digits}g}"


def _notes(found: Mapping[str, Any]) -> list[str]:
    ball, lines = found["ball"], []
    for name, xi in (("published", found["xi"]), ("centered", found["half_range"])):
        counts = Counter(one[name]["says"] for one in found["updates"])
        of = "as published" if name == "published" else "with the middle of the rewards subtracted"
        said = ", ".join(f"{counts[key]} {said}" for key, said in SAYS.items() if counts[key])
        lines += wrapped(f"{len(found['updates'])} updates, bound {of} (ξ = {xi:g}): {said}.")
    kl = "" if ball["kl"] is None else f" (KL ≤ {ball['kl']:g})"
    lines += wrapped(
        f"If every state had TV ≤ {ball['tv']:.3g}{kl}: max form {ball['max_form']:.3g}, sum form at most "
        f"{ball['sum_form']:.3g}. A reward changes by at most {found['rewards'][1] - found['rewards'][0]:g}."
    )
    lines += wrapped(
        "These are estimates, not a guarantee. The max form uses the largest TV that a recorded token proves; other "
        "states may have a larger one. π was trained on the sequences that the surrogate averages."
    )
    if found["truncated_sampling"]:
        lines += wrapped(
            "The sampler excluded tokens (top-p, top-k or min-p): the max form does not hold for such a μ, and the "
            "sum form is estimated too low."
        )
    if found["faulty"] or found["unrewarded"]:
        lines += wrapped(
            f"Left out: {found['faulty']:,} sequences × updates with a faulty token, {found['unrewarded']:,} without "
            "a reward."
        )
    return lines
