"""Rules for the values in the tables of a record, checked batch by batch with pyarrow. No torch."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trustrl.optional_imports import need
from trustrl.recording.part_names import PartName
from trustrl.recording.schema import TABLES

ROUNDING = 1e-3
"""Excess over 1 that a sum of probabilities may have by rounding."""


class Rule(NamedTuple):
    """Condition on one row. A row breaks the rule if `broken` is true; null is not a breach."""

    text: str
    """Rule as a phrase that follows "must"."""

    columns: tuple[str, ...]
    """Columns that it reads. It applies if all are present."""

    broken: Callable[..., Any]
    """Function from pyarrow.compute and the columns to flags."""

    is_error: bool = True
    """False if a sampler or trainer with a fault produces such values: the record is right and the numbers are not."""


def _negative(name: str) -> Rule:
    return Rule(f"have {name} ≥ 0", (name,), lambda pc, x: pc.less(x, 0))


def _logp(name: str) -> Rule:
    def impossible(pc: Any, x: Any) -> Any:
        return pc.or_(pc.is_nan(x), pc.greater(x, 0.0))

    return Rule(f"have a log-prob ≤ 0 in {name}", (name,), impossible, is_error=False)


def _finite(name: str) -> Rule:
    return Rule(f"have a finite {name}", (name,), lambda pc, x: pc.invert(pc.is_finite(x)), is_error=False)


def _lengths(pc: Any, ids: Any, logp: Any) -> Any:
    return pc.not_equal(pc.list_value_length(ids), pc.list_value_length(logp))


def _mass(pc: Any, ids: Any, logp: Any) -> Any:
    """Flags rows whose probabilities sum to more than 1. Padding has no mass."""
    pa = need("pyarrow", extra="records")
    values = pc.exp(pc.cast(pc.list_flatten(logp), pa.float64()))
    flat = pc.list_flatten(ids)
    if len(values) != len(flat):  # another rule reports it
        return pa.array([False] * len(ids))
    values = pc.if_else(pc.greater_equal(flat, 0), values, 0.0)
    rows = pa.table({"row": pc.list_parent_indices(logp), "mass": values}).group_by("row").aggregate([("mass", "sum")])
    over = pc.filter(rows["row"], pc.greater(rows["mass_sum"], 1 + ROUNDING))
    return pc.is_in(pa.array(range(len(ids)), pa.int64()), value_set=pc.cast(over, pa.int64()).combine_chunks())


TOKEN_RULES = (
    *(_negative(name) for name in ("step", "update", "rank", "sequence", "position", "turn")),
    *(_logp(name) for name in ("behavior_logp", "proximal_logp", "policy_logp", "topk_tail")),
    *(_finite(name) for name in ("advantage", "weight", "entropy")),
    Rule("have token_id ≥ 0", ("token_id",), lambda pc, x: pc.less(x, 0), is_error=False),
    Rule(
        "have 0 ≤ divergence_lower ≤ divergence_upper",
        ("divergence_lower", "divergence_upper"),
        lambda pc, low, high: pc.or_(pc.less(low, 0.0), pc.greater(low, high)),
    ),
    Rule("have as many topk_logp as topk_ids", ("topk_ids", "topk_logp"), _lengths),
    Rule("have topk_logp of total probability ≤ 1", ("topk_ids", "topk_logp"), _mass, is_error=False),
    Rule("have at least one id in kept_ids", ("kept_ids",), lambda pc, x: pc.equal(pc.list_value_length(x), 0)),
)
"""Rules of the token table."""

SEQUENCE_RULES = (
    *(_negative(name) for name in ("step", "rank", "sequence", "prompt_tokens", "completion_tokens")),
    *(_finite(name) for name in ("reward", "advantage")),
)
"""Rules of the sequence table."""

RULES = {"tokens": TOKEN_RULES, "sequences": SEQUENCE_RULES, "texts": (_negative("sequence"),)}
"""Rules by table."""


def first_breach(batch: Any, table: str, named: PartName | None) -> tuple[str, int] | None:
    """Returns the first rule that rows of a record batch break, and the first such row, or None.

    Checks errors alone: a sampler or trainer with a fault may produce the values that other rules are about.

    Args:
        batch: The record batch, with all or some columns of the table.
        table: Name of the table.
        named: Steps and rank of the file's name, or None if it is not the name of a part file.
    """
    pc = need("pyarrow.compute", extra="records")
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for column in TABLES[table]:
        values = columns.get(column.name)
        if values is not None and (nulls := values.null_count):
            if not column.nullable:
                return f"have {column.name} in every row", pc.index(values.is_null(), True).as_py()
            if table == "tokens" and nulls < len(batch):
                return f"have {column.name} in all rows or in none", pc.index(
                    values.is_null(), values[0].is_valid
                ).as_py()
    for rule, flags in misplaced(batch, named):
        if pc.any(flags).as_py():
            return rule, pc.index(flags, True).as_py()
    for rule in RULES[table]:
        if rule.is_error and columns.keys() >= set(rule.columns):
            flags = rule.broken(pc, *(columns[name] for name in rule.columns))
            if pc.any(flags).as_py():
                return rule.text, pc.index(flags, True).as_py()
    return None


def misplaced(batch: Any, named: PartName | None) -> Iterator[tuple[str, Any]]:
    """Yields a rule for step and rank, with the rows that do not have the numbers in the file's name."""
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    if named is None:
        return
    for name, low, high in (("step", named.first, named.last), ("rank", named.rank, named.rank)):
        if name in batch.schema.names:
            column = batch.column(name)
            value = f"{low}" if low == high else f"{low} to {high}"
            yield (
                f"have the {name} of its name ({value}) in the column {name}",
                pc.or_(pc.less(column, pa.scalar(low, pa.int64())), pc.greater(column, pa.scalar(high, pa.int64()))),
            )


def breaches(batch: Any, table: str) -> Iterator[tuple[Rule, int]]:
    """Yields each rule that rows of a record batch break, with the number of rows."""
    pc = need("pyarrow.compute", extra="records")
    for rule in RULES[table]:
        if set(rule.columns) <= set(batch.schema.names):
            flags = rule.broken(pc, *(batch.column(name) for name in rule.columns))
            if num := pc.sum(flags).as_py():
                yield rule, num
