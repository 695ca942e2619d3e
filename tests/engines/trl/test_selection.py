"""`trustrl select` with a model that transformers runs: killed in the middle, and run again."""

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from support.trl_commands import environment
from trustrl.errors import TrustRLWarning
from trustrl.runner.answer_samplers import AnswerSampling, sampler
from trustrl.world import models
from trustrl.world.models.stand_in import subtractions

RECIPE = """
name = "mine"
[model]
name = "stand-in-llama"
[data]
files = "mine.jsonl"
chat = true
[reward]
function = "exact"
[engine]
name = "trl"
[region]
preset = "ppo"
[optimiser]
learning_rate = 1e-5
[schedule]
steps = 1
prompts_per_step = 2
completions_per_prompt = 2
max_prompt_tokens = 128
max_completion_tokens = 12
"""
WORDS = ["mine.toml", "--out", "kept", "--answers", "16", "--batch", "2"]


def test_a_recipe_for_vllm_warns_if_transformers_answers_instead():
    assert find_spec("vllm") is None, "this environment has none"
    settings = AnswerSampling(
        model=models.path("stand-in-llama"), device="cpu", dtype="float32", temperature=1.0, answers=1,
        max_prompt_tokens=32, max_new_tokens=4, vllm={},
    )  # fmt: skip
    with pytest.warns(TrustRLWarning, match="vLLM is not installed, so transformers samples the answers"):
        sample = sampler(settings)
    assert len(sample([{"prompt": "1 + 1"}], 0)[0]) == 1


def test_a_killed_selection_is_continued_and_selects_what_the_model_solves_sometimes(tmp_path):
    rows = [{"prompt": text, "answer": str(answer)} for text, answer in list(subtractions())[:16]]
    rows += [{"prompt": f"What is {i} + {i}?", "answer": "never"} for i in range(8)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "trustrl.cli", "select", *WORDS]
    counts, lines = tmp_path / "kept/counts-1-of-1.jsonl", []
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        end = time.monotonic() + 300
        while len(lines) < 4 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
            lines = counts.read_text().splitlines() if counts.exists() else []
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = counts.read_text().splitlines()
    assert 4 <= len(before) < 24, (tmp_path / "log").read_text()[-3000:]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "answering problems: step" in done.stderr
    after = counts.read_text().splitlines()
    assert after[: len(before)] == before
    assert len({json.loads(line)["problem"] for line in after}) == len(after) == 24
    selected = [json.loads(line) for line in (tmp_path / "kept/selected.jsonl").read_text().splitlines()]
    assert json.loads(done.stdout) == {
        "problems": 24, "counted": 24, "selected": len(selected), "files": ["kept/selected.jsonl"],
    }  # fmt: skip
    assert len(selected) > 8  # a third of the answers is right
    assert all(row in rows[:16] for row in selected)
