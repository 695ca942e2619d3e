"""Runs rows of the contract on one running engine, and writes them as JSON.

    python -m support.contract.run vllm FOLDER OUT [--engine main] [--rows NAME ...]

One engine per process: some engines take minutes to start, and one that is collected takes others with it.
"""

import argparse
import json
import os
from importlib import import_module
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

from support.contract.driver import Cannot
from support.contract.rows import ROWS, Case, outcome
from support.tiny_models import VOCABULARY, save_model

SAMPLERS = ("vllm", "sglang")
"""`support/contract/NAME_driver.py` has the class `Driver` of each."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sampler", choices=SAMPLERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", default="main")
    parser.add_argument("--rows", nargs="+")
    options = parser.parse_args()
    names = options.rows or [name for name, (engine, _) in ROWS.items() if engine == options.engine]
    first, second = options.folder / "first", options.folder / "second"
    for seed, folder in enumerate((first, second)):
        save_model(folder, tied=False, seed=seed, max_position_embeddings=512)
    try:
        driver = import_module(f"support.contract.{options.sampler}_driver").Driver(first, options.engine)
    except Cannot as error:
        rows = [{"row": name, "result": "cannot", "note": str(error)} for name in names]
        options.out.write_text(json.dumps({"sampler": options.sampler, "rows": rows}))
        return
    case = Case(driver, first, second, VOCABULARY)
    rows = []
    for name in names:
        rows.append(outcome(case, name))
        print(json.dumps(rows[-1]), flush=True)
    options.out.write_text(json.dumps({"sampler": options.sampler, "version": driver.version, "rows": rows}))


if __name__ == "__main__":
    main()
