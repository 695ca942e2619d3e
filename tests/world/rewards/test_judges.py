"""Reward functions in child processes: their limits, their faults, and their names."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from trustrl.errors import ConfigError, EngineError, TrustRLWarning
from trustrl.world.rewards import Judges, RewardFunction
from trustrl.world.rewards.functions import exact, final_answer
from trustrl.world.rewards.judges import ALL_FAILED, judges_of

OWN = '''
import os, sys, time

def score(completion, answer, level="none"):
    """Behaves as the completion says."""
    print("a line on stdout")
    if completion == "hang":
        while True: pass
    if completion == "power":
        9 ** 9 ** 9 ** 9
    if completion == "sleep":
        time.sleep(600)
    if completion == "memory":
        return len(bytearray(1 << 40))
    if completion == "die":
        os._exit(3)
    if completion == "raise":
        raise KeyError("no such key")
    if completion == "none":
        return None
    if completion == "child":
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "977")
        time.sleep(600)
    if completion == "level":
        return level
    return float(completion == answer)
'''


@pytest.fixture
def judges(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    made = Judges(RewardFunction(function=f"{tmp_path / 'own.py'}:score", seconds=1.5, memory_gb=2.0))
    yield made
    made.close()


def asked(judges, completion, **more):
    return judges.score({"completion": completion, "answer": "4", "prompt": "2+2=", **more})


def test_a_function_of_ones_own_scores_what_it_is_given(judges):
    assert [asked(judges, text) for text in ("4", "5", " 4")] == [1.0, 0.0, 0.0]
    assert asked(judges, "level", level=0.25) == 0.25
    assert asked(judges, "4\ud800\n\x00é") == 0.0
    assert judges.faults == {}


@pytest.mark.parametrize(("completion", "kind"), [
    ("hang", "time"), ("power", "time"), ("sleep", "time"), ("child", "time"),
    ("memory", "error"), ("die", "error"), ("raise", "error"),
])  # fmt: skip
def test_a_broken_limit_scores_nothing_is_said_and_leaves_the_next_completion_alone(judges, completion, kind):
    began = time.monotonic()
    with pytest.warns(TrustRLWarning, match="1 of 1 so far"):
        assert asked(judges, completion) == 0.0
    assert time.monotonic() - began < 60  # a loaded machine starts a process slowly; the function would never end
    assert judges.faults == {kind: 1}
    assert asked(judges, "4") == 1.0
    if completion == "child":
        assert not subprocess.run(["pgrep", "-f", "sleep 977"], check=False, capture_output=True).stdout


def test_a_result_that_is_no_number_is_an_error_of_the_function(judges):
    with pytest.raises(EngineError, match="must return a finite number, got None"):
        asked(judges, "none")


def test_a_function_that_fails_every_time_stops_the_run(judges):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrustRLWarning)
        for _ in range(ALL_FAILED - 1):
            assert asked(judges, "raise") == 0.0
        with pytest.raises(EngineError, match=r"got no score for any of the first 32.*KeyError"):
            asked(judges, "raise")


def test_a_function_that_fails_often_does_not(judges):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert asked(judges, "4") == 1.0
        for _ in range(ALL_FAILED + 1):
            assert asked(judges, "raise") == 0.0
    assert len([warning for warning in said if warning.category is TrustRLWarning]) == 2  # the first and the tenth
    assert judges.faults == {"error": ALL_FAILED + 1}


@pytest.mark.parametrize(("function", "fault"), [
    ("absent.py:score", "absent.py does not exist"),
    ("own.py:absent", "no attribute 'absent'"),
    ("no_such_module.at_all:score", "No module named 'no_such_module'"),
    ("broken.py:score", "SyntaxError"),
])  # fmt: skip
def test_a_function_that_cannot_be_loaded_is_named(tmp_path, function, fault):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def score(:")
    place = f"{tmp_path / function}" if ".py:" in function else function
    with pytest.raises(ConfigError, match=r"reward\.function must be loadable") as raised:
        Judges(RewardFunction(function=place)).start()
    assert fault in str(raised.value)


@pytest.mark.parametrize("table", [
    {"function": "exct"}, {"function": ":score"}, {"function": "own.py:"}, {"function": 3},
    {"function": "exact", "seconds": 0}, {"function": "exact", "processes": 0}, {"function": "exact", "memory_gb": -1},
    {"function": "exact", "weight": float("nan")}, {"function": "exact", "settings": 3},
])  # fmt: skip
def test_a_table_is_checked(table):
    with pytest.raises(ConfigError, match=r"reward\."):
        RewardFunction(**table)


def test_a_process_ends_with_its_parent_though_it_computes(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    code = (
        "from trustrl.world.rewards import Judges, RewardFunction\n"
        f"judges = Judges(RewardFunction(function={str(tmp_path / 'own.py')!r} + ':score', seconds=300.0))\n"
        "judges.start()\n"
        "print(judges._free.queue[0]._process.pid, flush=True)\n"
        "judges.score({'completion': 'sleep', 'answer': '4'})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(300):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{child}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":  # nobody in a container waits for orphans
                return
        time.sleep(0.1)
    pytest.fail("the child outlives its parent")


MEETING = """
import pathlib, time
def score(completion):
    here = pathlib.Path(__file__).parent / "met"
    here.mkdir(exist_ok=True)
    (here / completion).touch()
    last = time.monotonic() + 60.0
    while len(list(here.iterdir())) < 8:
        if time.monotonic() > last:
            return 0.0
        time.sleep(0.01)
    return 1.0
"""


def test_completions_are_scored_side_by_side(tmp_path):
    (tmp_path / "meeting.py").write_text(MEETING)  # each call waits for the other seven
    from trustrl.world.tasks import OwnData

    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    task = OwnData(
        data=[{"files": str(tmp_path / "a.jsonl")}],
        reward=[{"function": f"{tmp_path / 'meeting.py'}:score", "processes": 8, "seconds": 120}],
    )
    row = {"prompt": "a", "answer": "b", "columns": "{}"}
    assert task.scores([str(number) for number in range(8)], [row] * 8) == [1.0] * 8


def test_threads_of_a_process_share_its_judges(monkeypatch):
    """Each would start processes of its own, and count for itself."""

    class Slow(Judges):
        def __init__(self, table):
            time.sleep(0.1)
            super().__init__(table)

    monkeypatch.setattr("trustrl.world.rewards.judges.Judges", Slow)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: judges_of('{"function": "exact", "processes": 7}'), range(8)))
    assert len(set(map(id, made))) == 1


class SlowCounter(Counter):
    """Lets other threads run between reading a count and writing it."""

    def __setitem__(self, kind, count):
        time.sleep(0.001)
        super().__setitem__(kind, count)


def test_a_function_that_fails_every_time_stops_the_run_of_many_threads():
    class Fails:
        def ask(self, arguments):
            return {"error": "KeyError"}

    judges = Judges(RewardFunction(function="exact", processes=8))
    for _ in range(8):
        judges._free.get()
        judges._free.put(Fails())
    judges.faults = SlowCounter()
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as threads:
        warnings.simplefilter("ignore", TrustRLWarning)
        asks = [threads.submit(judges.score, {}) for _ in range(2 * ALL_FAILED)]
    assert (judges.scored, judges.faults) == (2 * ALL_FAILED, {"error": 2 * ALL_FAILED})
    assert [type(ask.exception()) for ask in asks if ask.exception()] == [EngineError]


ROOM = """
import resource, time
def score(completion):
    return resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()
"""


def test_threads_of_a_function_may_use_every_processor_for_its_seconds(tmp_path):
    """Their CPU time adds up: at one CPU second a second, threads of a library would end the function early."""
    (tmp_path / "room.py").write_text(ROOM)
    judges = Judges(RewardFunction(function=f"{tmp_path / 'room.py'}:score", seconds=100.0))
    try:
        assert judges.score({"completion": "x", "answer": "4"}) >= 100 * os.cpu_count()
    finally:
        judges.close()


def test_a_limit_on_cpu_time_that_is_there_already_is_kept(tmp_path):
    """As a cluster sets it. A process may not raise it."""
    (tmp_path / "room.py").write_text(ROOM)
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (300, 300))\n"
        "from trustrl.world.rewards import Judges, RewardFunction\n"
        f"judges = Judges(RewardFunction(function={str(tmp_path / 'room.py')!r} + ':score', seconds=1000.0))\n"
        "print(judges.score({'completion': 'x', 'answer': '4'}))\n"
        "judges.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 200 < float(done.stdout) <= 300, done.stderr


@pytest.mark.parametrize(("text", "answer"), [
    ("#### 72", "72"), ("a #### 1 #### 2", "2"), (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} and \boxed{2", r"\boxed{1} and \boxed{2"), ("<answer>\n7 </answer>", "7"), ("", ""), ("72", "72"),
])  # fmt: skip
def test_the_final_answer_of_a_text(text, answer):
    assert final_answer(text) == answer


def test_exact_compares_final_answers():
    assert exact(r"Thus \boxed{72}", "7 + 65\n#### 72") == 1.0
    assert exact("72.0", "72") == 0.0
