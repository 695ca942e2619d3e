"""`python -m trustrl.engines.trl script.py ...`: runs a script, and records every stock `GRPOTrainer` that it trains.

For scripts that cannot be edited. `TRUSTRL_RECORD`, `TRUSTRL_RECORD_SAMPLE` and `TRUSTRL_RECORD_REGION` choose the
folder, the share of sequences and an observed preset; the folder is `<output_dir>/records` otherwise. `-m` before a
module's name runs a module, such as `-m trl.scripts.grpo`.
"""

import os
import runpy
import sys
from typing import Any

from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

from trustrl.engines.common.stock_tokens import FOLDER, REGION, SAMPLE
from trustrl.engines.trl.stock_record import record
from trustrl.engines.trl.trainer import TrustRegionMixin


def install() -> None:
    """Makes `GRPOTrainer.train` record, unless the trainer has a region or records already."""
    theirs = GRPOTrainer.train

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, TrustRegionMixin) and "_compute_loss" not in vars(self):
            sample = os.environ.get(SAMPLE)
            more = {"sample": float(sample)} if sample else {}
            record(self, os.environ.get(FOLDER) or None, region=os.environ.get(REGION) or None, **more)
        return theirs(self, *args, **kwargs)

    GRPOTrainer.train = train


def main(arguments: list[str]) -> None:
    """Runs the script or module with its own arguments."""
    as_module = arguments[:1] == ["-m"]
    if not arguments[as_module:]:
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    install()
    sys.argv = arguments[as_module:]
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
