"""Random outages of a store: every row of every acknowledged step is in the store at the end, or counted as dropped.

`python -m pytest` runs 20 histories; `TRUSTRL_HISTORIES=200` runs more. A history is decided by its number alone.
"""

import io
import os
import random
import re
import threading
import time
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest

pa = pytest.importorskip("pyarrow")


from support import recording_batches as batches
from trustrl.errors import TrustRLWarning
from trustrl.recording import Recorder, Recording, read, read_sequences, storage, uploads
from trustrl.recording.record_check import check_record
from trustrl.recording.storage import Remote

HISTORIES = int(os.environ.get("TRUSTRL_HISTORIES", "20"))


class Store:
    """A filesystem as pyarrow has them, in memory, that does what `mode` says to a request.

    "up"; "down" refuses; "hang" waits until the mode changes and then refuses; "torn" stores half of a file and
    refuses; "lost" does everything and refuses, as if the answer got lost.
    """

    type_name = "store-with-faults"

    def __init__(self):
        self.files, self.mode, self.put = {}, "up", []
        self._turned = threading.Event()

    def turn(self, mode):
        self.mode = mode
        self._turned.set()
        self._turned = threading.Event()

    def _request(self):
        """Returns the mode that decides this request."""
        mode, turned = self.mode, self._turned
        if mode == "hang":
            turned.wait(20.0)
        if mode in ("down", "hang"):
            raise RuntimeError(mode)
        return mode

    def open_output_stream(self, path):
        store = self

        class Stream(io.BytesIO):
            def __exit__(self, kind, *error):
                mode = store._request()
                content = self.getvalue()
                store.files[path] = content[: len(content) // 2] if mode == "torn" else content
                store.put.append(path)
                if mode in ("torn", "lost"):
                    raise RuntimeError(mode)

        return Stream()

    def create_dir(self, path, *, recursive):
        self._request()

    def open_input_file(self, path):
        self._request()
        if path not in self.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self.files[path])

    def get_file_info(self, selector):
        self._request()
        if isinstance(selector, str):
            kind = "File" if selector in self.files else "NotFound"
            return SimpleNamespace(type=SimpleNamespace(name=kind), path=selector)
        start = f"{selector.base_dir}/"
        inside = {path.removeprefix(start).split("/")[0] for path in self.files if path.startswith(start)}
        return [SimpleNamespace(path=start + name) for name in inside]

    def move(self, path, target):
        mode = self._request()
        if path not in self.files:
            raise FileNotFoundError(path)
        self.files[target] = self.files.pop(path)
        if mode == "lost":
            raise RuntimeError(mode)

    def delete_file(self, path):
        mode = self._request()
        if self.files.pop(path, None) is None:
            raise FileNotFoundError(path)
        if mode == "lost":
            raise RuntimeError(mode)

    def saved(self, path, folder):
        """Writes the files below a path to a local folder."""
        for name, content in self.files.items():
            file = folder / name.removeprefix(f"{path}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return folder


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(uploads, "FIRST_WAIT", 0.0005)
    monkeypatch.setattr(uploads, "LONGEST_WAIT", 0.002)


def ended(recorder):
    """Ends the uploads of a recorder as SIGKILL does: no flush, the file in progress is stored or not."""
    made = recorder._uploads
    with made._changed:
        made._ends = True
        made._changed.notify_all()
        thread = made._thread
    if thread is not None:
        thread.join(30.0)
        assert not thread.is_alive()
    made._lock.close()
    made._process = -1  # the exit of this process does nothing for it


def dropped(texts):
    """Tokens and sequences in the warnings about steps that were written no more."""
    numbers = [re.search(r"lack ([\d,]+) tokens and ([\d,]+) sequences", text) for text in texts]
    counts = [[int(number.replace(",", "")) for number in match.groups()] for match in numbers if match]
    return [sum(column) for column in zip(*counts, strict=True)] or [0, 0]


def step_in(name, attempt):
    """The step of a file of the token table that this attempt wrote, or None for another file."""
    match = re.fullmatch(r"step-(\d+)\.rank-0000(?:\.attempt-(\d+))?\.parquet", name)
    return int(match[1]) if match and int(match[2] or 1) == attempt else None


def taken(recorder, store, path, first):
    """Steps of this process of which the tokens, and of which the sequences, wait in its spool or are in the store.

    After a dropped step its sequences may come with a later one, because later tokens may need them.
    """
    waiting = [file.relative_to(recorder._uploads._own) for file in recorder._uploads._own.rglob("step-*")]
    names = [*map(str, waiting), *(name.removeprefix(f"{path}/") for name in store.put)]
    attempt = recorder._claim.attempt
    steps = ({step_in(name.removeprefix(folder), attempt) for name in names} for folder in ("", "sequences/"))
    return [{step for step in found if step is not None and step >= first} for found in steps]


def in_store(folder):
    tokens = Counter(read(folder)["step"].tolist()) if list(folder.glob("step-*")) else Counter()
    return tokens, Counter(read_sequences(folder)["step"].to_pylist())


@pytest.mark.parametrize("history", range(HISTORIES))
def test_every_row_is_in_the_store_or_counted_as_dropped_and_never_both(history, tmp_path, monkeypatch):
    draw, store, path = random.Random(history), Store(), "bucket/records"
    where = Remote(f"faults://{history}/{path}", store, path)
    place = storage.place
    monkeypatch.setattr(storage, "place", lambda address: where if address == "faults" else place(address))
    settings = Recording(
        folder="faults", sample=1.0, ring_steps=0, triggers=(), spool=str(tmp_path / "spool"),
        spool_bytes=draw.choice([8_000, 40_000, 2**30]),
    )  # fmt: skip
    expected, num_processes, first = ({}, {}), draw.randint(1, 3), 0
    for process in range(num_processes):
        store.turn("up")
        added, store.put = {}, []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TrustRLWarning)
            recorder = Recorder(settings, batches.REGION, rank=0)
            for step in range(first, first + draw.randint(4, 14)):
                if draw.random() < 0.4:
                    store.turn(draw.choice(["up", "up", "down", "hang", "torn", "lost"]))
                b = batches.batch(seed=draw.randrange(5), rows=draw.randint(1, 8), first=8 * step)
                recorder.add_sequences(batches.sequence_rows(b.sequences.tolist()), step=step)
                batches.give(recorder, b, step=step)
                added[step] = (int(b.rollout.in_loss.sum()), len(b.sequences))
                if draw.random() < 0.3:
                    time.sleep(0.003)
            if process == num_processes - 1:
                store.turn("up")
                recorder.flush(30.0)
            else:
                store.turn("down")
                ended(recorder)
                recorder._dropped.over(None, num_sequences=recorder._forget(list(recorder._sequences)))
        texts, whole = [str(warning.message) for warning in caught], taken(recorder, store, path, first)
        for table, (steps, wanted) in enumerate(zip(whole, expected, strict=True)):
            lost = [counts[table] for step, counts in added.items() if step not in steps]
            assert dropped(texts)[table] == sum(lost), texts
            for step in [step for step in wanted if step >= first]:
                del wanted[step]
            wanted.update({step: counts[table] for step, counts in added.items() if step in steps})
        recorder._uploads.end(0.0)
        first = draw.randint(first, step + 1)  # a checkpoint of this process
    saved = store.saved(path, tmp_path / "saved")
    tokens, sequences = in_store(saved)
    assert (tokens, sequences) == expected
    report = check_record(saved)
    assert report.is_valid or not tokens, report.findings
    assert not [file for file in (tmp_path / "spool").rglob("*") if file.is_file()]
