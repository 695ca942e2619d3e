"""Raw data of the proxy study: one row per token, arm and number of updates."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[2] / "docs/results/data/proxies"
MODELS = ("smollm2-135m", "verses", "code")
UPDATES = (1, 4, 16)
MINI_BATCHES = 4  # completion i is in mini-batch i mod 4
KS = (1, 2, 4, 8, 16, 20, 32, 64, 256, 1024)
TOKEN = ("sequence", "advantage", "log_mu", "entropy")
BITS = 11  # of the 23 that a float32 mantissa has; a relative error of 2.5e-4 is invisible in the tables


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns float32 values with a short mantissa, which compress well."""
    drop = 23 - BITS
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return (((whole + (1 << (drop - 1))) >> drop) << drop).astype(np.uint32).view(np.float32)


def pack(measured: Path, settings: Mapping[str, Any]) -> None:
    """Writes the files in `measured` as Parquet: the sampled tokens of each batch, and their divergences in each arm.

    Raises:
        ValueError: If two arms of a batch did not start from the same tokens.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    DATA.mkdir(parents=True, exist_ok=True)
    about = {}
    for name in MODELS:
        files = sorted((measured / name).glob("??-*.npz"))
        if not files:
            continue
        shape = json.loads((measured / name / "model.json").read_text())
        tokens, rows, worst, seconds = {}, [], 0.0, 0.0
        for file in files:
            batch, arm = file.stem.split("-")
            with np.load(file) as found:
                here = {key: found[key] for key in TOKEN}
                first = tokens.setdefault(int(batch), here)
                if len(first["log_mu"]) != len(here["log_mu"]) or not np.allclose(first["log_mu"], here["log_mu"]):
                    raise ValueError(
                        f"{file} has other tokens than another arm. Delete the batch and measure it again."
                    )
                worst, seconds = max(worst, float(found["worst"])), seconds + float(found["seconds"])
                for update in UPDATES:
                    prefix = f"{update}/"
                    part = {k.removeprefix(prefix): found[k] for k in found.files if k.startswith(prefix)}
                    rows.append({"arm": arm, "update": update, "batch": int(batch), **part})
        rows.sort(key=lambda row: (row["arm"], row["update"], row["batch"]))
        kept = {"batch": np.concatenate([np.full(len(t["log_mu"]), b, np.int8) for b, t in tokens.items()])}
        kept |= {key: np.concatenate([t[key] for t in tokens.values()]) for key in TOKEN}
        write(pa, pq, DATA / f"{name}-tokens.parquet", kept, short=False)
        for arm in sorted({row["arm"] for row in rows}):
            write(pa, pq, DATA / f"{name}-{arm}.parquet", joined([row for row in rows if row["arm"] == arm]))
        about[name] = {
            **asdict(settings[name]),
            "batches": len(tokens),
            "tokens": len(kept["log_mu"]),
            "arms": sorted({row["arm"] for row in rows}),
            "differs_from_library": worst,
            "minutes": seconds / 60,
            **{key: value for key, value in shape.items() if key != "minutes"},
        }
    about["versions"] = {name: version(name) for name in ("torch", "transformers")}
    (DATA / "settings.json").write_text(json.dumps(about, indent=1) + "\n")


def joined(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns the columns of an arm: of each number of updates, all batches, token by token."""
    sizes = [len(row["log_ratio"]) for row in rows]
    keys = {key: [row[key] for row in rows] for key in ("update", "batch")}
    found = {key: np.repeat(np.array(values, np.int8), sizes) for key, values in keys.items()}
    return found | {key: np.concatenate([row[key] for row in rows]) for key in rows[0] if key not in ("arm", *keys)}


def write(pa, pq, path: Path, columns: dict[str, np.ndarray], *, short: bool = True) -> None:
    """Writes float columns as float32, rounded if `short`, and others unchanged."""
    floats = [name for name, values in columns.items() if values.dtype.kind == "f"]
    as_written = rounded if short else np.float32
    table = pa.table({name: as_written(values) if name in floats else values for name, values in columns.items()})
    pq.write_table(
        table, path, compression="zstd", compression_level=19,
        use_dictionary=[name for name in columns if name not in floats],
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
    )  # fmt: skip
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


@cache
def about() -> dict:
    """Returns the settings and counts of the measurement."""
    return json.loads((DATA / "settings.json").read_text())


@cache
def columns(name: str) -> dict[str, np.ndarray]:
    """Returns the columns of a file."""
    import pyarrow.parquet as pq

    table = pq.read_table(DATA / f"{name}.parquet")
    return {key: table[key].to_numpy() for key in table.column_names}


@cache
def batches(name: str, arm: str, update: int) -> list[dict[str, np.ndarray]]:
    """Returns every batch of one arm after some updates, with every statistic of its tokens by name."""
    tokens, moves = columns(f"{name}-tokens"), columns(f"{name}-{arm}")
    at, found = moves["update"] == update, []
    for batch in np.unique(moves["batch"][at]):
        own, here = tokens["batch"] == batch, at & (moves["batch"] == batch)
        one = {key: values[own] for key, values in tokens.items()}
        one |= {key: values[here].astype(float) for key, values in moves.items() if key not in ("update", "batch")}
        found.append(one | statistics(one))
    return found


def statistics(one: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the statistics that follow from the sampled token alone, and the two controls."""
    log_mu, log_ratio = one["log_mu"].astype(float), one["log_ratio"]
    log_mu = np.minimum(log_mu, -1e-12)
    mu, pi = np.exp(log_mu), np.minimum(np.exp(log_mu + log_ratio), 1 - 1e-12)
    return {
        "ratio": np.abs(np.expm1(log_ratio)),
        "log_r": np.abs(log_ratio),
        "tv_binary": np.abs(mu * np.expm1(log_ratio)),
        "kl_binary": np.maximum(-mu * log_ratio + (1 - mu) * np.log((1 - mu) / (1 - pi)), 0),
        "surprise": -log_mu,
    }
