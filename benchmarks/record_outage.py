"""Time that a step spends in the recorder while an object store hangs, next to a local folder.

    PYTHONPATH=tests python benchmarks/record_outage.py [STEPS]

One run records every step twice, to a folder and to an S3 server on this machine, in turns. The server hangs for the
middle third of the steps. Prints the median milliseconds of `add`, `add_sequences` and `end_step`, and what the store
has in the end.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from support import recording_batches as batches
from support.failing_s3 import environment, failing_s3
from trustrl.errors import TrustRLWarning
from trustrl.recording import Recorder, Recording, read
from trustrl.recording.record_check import check_record


def step_time(recorder: Recorder, step: int) -> float:
    """Records one step of 64 sequences with 256 tokens each. Returns its milliseconds."""
    made = batches.batch(seed=step, rows=64, length=256, first=64 * step)
    rows = batches.sequence_rows(range(64 * step, 64 * step + 64))
    before = time.perf_counter()
    recorder.add_sequences(rows, step=step)
    batches.give(recorder, made, step=step)
    return 1000 * (time.perf_counter() - before)


def main(num_steps: int) -> None:
    """Prints one line for each third of the run, and one for the record."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    with TemporaryDirectory() as scratch, failing_s3() as server, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", TrustRLWarning)
        address = server.address("run/records")
        recorders = [
            Recorder(Recording(folder=folder, sample=1.0, spool=f"{scratch}/spool"), batches.REGION, rank=0)
            for folder in (f"{scratch}/local", address)
        ]
        for name, mode in (("before", "up"), ("hanging", "hang"), ("after", "up")):
            server.turn(mode)
            first = num_steps * ("before", "hanging", "after").index(name) // 3
            times = []
            for step in range(first, first + num_steps // 3):
                order = recorders if step % 2 else recorders[::-1]
                spent = {recorder: step_time(recorder, step) for recorder in order}
                times.append([spent[recorder] for recorder in recorders])
            local, remote = (median(column) for column in zip(*times, strict=True))
            print(f"{name:8} folder {local:6.2f} ms, store {remote:6.2f} ms, longest {max(t for _, t in times):.0f} ms")
        recorders[1].flush(300.0)
        same = read(address).table.equals(read(Path(scratch, "local")).table)
        print(f"equal to the folder: {same}; valid: {check_record(address).is_valid}; warnings:")
        for warning in said:
            print(f"  {warning.message}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 90)
