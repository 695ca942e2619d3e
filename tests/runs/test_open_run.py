"""open_run on run directories, on folders that hold several things or none, and on formats known from sources only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.recorded import record
from support.run_files import unpacked
from support.run_folders import run_folder, steps, write_records
from trustrl.core.metrics import METRICS
from trustrl.errors import ConfigError, RecordError, TrustRLWarning
from trustrl.runs.metric_names import ENGINE_NAMES
from trustrl.runs.open_run import open_run, open_runs, short_labels


def test_a_run_directory_has_its_recipe_metrics_and_end(tmp_path):
    run = open_run(run_folder(tmp_path / "a", updates=2))
    assert (run.name, run.status, run.seconds, run.row_is) == ("small", "finished", 12.5, "update")
    assert run.rows == steps(8)
    assert [(one["step"], one["accuracy"], one["count"]) for one in run.evaluations] == [(0, 0.25, 500), (8, 0.75, 500)]
    settings = run.settings
    assert (settings.engine, settings.steps_planned, settings.updates_per_batch) == ("trl", 16, 2)
    assert settings.region["kind"] == "dppo"
    assert run.recipe["schedule"]["steps"] == 16
    assert run.records == ()
    assert run.faults == ()


def test_records_beside_a_run_are_found(tmp_path):
    folder = run_folder(tmp_path / "a")
    write_records(folder / "records", {"position": [0, 1]}, step=1)
    run = open_run(folder)
    assert run.records == (str(folder / "records"),)
    assert "token records" not in {one.what for one in run.missing}
    stock = unpacked("trl-1.16.0", tmp_path / "stock")
    write_records(stock / "records", {"position": [0, 1]}, step=1)
    assert open_run(stock).records == (str(stock / "records"),)
    assert open_run(stock / "records").source == "token records"


def test_an_unfinished_run_says_so_and_a_cut_line_is_a_fault(tmp_path):
    folder = run_folder(tmp_path / "a", rows=steps(8)[:3], finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    run = open_run(folder)
    assert (run.status, run.steps, run.seconds) == ("unfinished", 3, None)
    assert run.faults == ("metrics.jsonl: the last line is truncated; left out",)
    (tmp_path / "a.log").write_text("step 2\nerror: the sampler died\n")
    assert (open_run(folder).status, open_run(folder).last_words) == ("failed", "step 2\nerror: the sampler died")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("recipe.toml", "= 3", "must be valid TOML"),
        ("metrics.jsonl", "{]\n", "must be JSON"),
        ("result.json", "[", "must be JSON"),
    ],
)
def test_a_broken_file_of_trustrl_is_refused(name, text, said, tmp_path):
    folder = run_folder(tmp_path / "a")
    (folder / name).write_text(text)
    with pytest.raises(RecordError, match=said):
        open_run(folder)


def test_completions_of_a_verl_recipe_count_updates(tmp_path):
    folder = run_folder(tmp_path / "a", updates=2)
    text = (folder / "recipe.toml").read_text()
    assert text.count('name = "trl"') == 1
    (folder / "recipe.toml").write_text(text.replace('name = "trl"', 'name = "verl"'))
    unpacked("verl-0.9.1", tmp_path / "verl")
    (tmp_path / "verl/rollouts").rename(folder / "rollouts")
    run = open_run(folder)
    assert run.row_is == "batch"
    assert sorted({one.step for one in run.completions()}) == [2, 4, 6]


def test_what_is_no_run_is_refused_with_the_formats_that_were_looked_for(tmp_path):
    with pytest.raises(ConfigError, match="must be a folder or file that exists"):
        open_run(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match=r"recipe.toml \(trustrl run directory\); trainer_state.json.*events.out"):
            open_run(path)


def test_a_folder_of_runs_names_them(tmp_path):
    run_folder(tmp_path / "a")
    unpacked("trl-1.0.0", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"a folder of runs\. Pass one of a, b inside it"):
        open_run(tmp_path)


def test_several_runs_have_short_labels_and_each_is_given_once(tmp_path):
    a, b = run_folder(tmp_path / "a", name="s-ppo-0"), run_folder(tmp_path / "b", name="s-dppo-0")
    assert [label for label, _ in open_runs([a, b])] == ["ppo", "dppo"]
    with pytest.raises(ConfigError, match="twice"):
        open_runs([a, tmp_path / "b" / ".." / "a"])
    assert short_labels(["tour", "tour"], [Path("a"), Path("b")]) == ["tour (a)", "tour (b)"]


UNITS = {
    "reward": "reward", "reward_std": "reward", "loss": "loss", "grad_norm": "norm", "learning_rate": "1",
    "entropy": "nats", "completion_length": "tokens", "frac_reward_zero_std": "share of groups",
    "frac_reward_nan": "share of completions", "clip_share": "share of tokens", "kl": "nats",
    "seconds": "seconds", **{f"trustrl/{metric.name}": metric.unit for metric in METRICS},
}  # fmt: skip
"""Our names of trainers' metrics, and their units. `kl` is the mean k3 estimate relative to the reference model."""


def test_every_metric_with_a_name_of_ours_has_a_unit():
    assert {ours for names in ENGINE_NAMES.values() for ours in names.values()} <= UNITS.keys()


def test_the_page_lists_every_name(request):
    page = (Path(request.config.rootpath) / "docs/reference/run-formats.md").read_text()
    for engine in ("trl", "verl"):
        for theirs, ours in ENGINE_NAMES[engine].items():
            if ours != "frac_reward_nan":  # only trustrl's own trainer logs it
                assert any(f"`{ours}`" in line and f"`{theirs}`" in line for line in page.splitlines()), theirs


def test_no_reader_imports_torch(tmp_path):
    folder = unpacked("trl-1.16.0", tmp_path)
    code = """
import os, sys
from trustrl.runs.open_run import open_run
assert list(open_run(sys.argv[1]).completions())
print('torch' in sys.modules, flush=True)
os._exit(0)  # what Arrow does when a process ends is not tested here
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["False"]), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_reader_starts_threads_of_arrow(tmp_path):
    """They abort the process now and then if it ends soon after a read."""
    record(tmp_path / "own" / "records")
    unpacked("trl-1.16.0", tmp_path / "trl")
    code = """
import os, sys
import pyarrow.parquet
from trustrl.recording.record_files import part_files, read_table
from trustrl.runs.open_run import open_run
before = len(os.listdir("/proc/self/task"))
assert list(open_run(sys.argv[1] + "/trl").completions())
assert [read_table(one) for one in part_files(sys.argv[1] + "/own/records")]
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


def test_fake_dumps_of_slime_have_tokens_and_log_probs(tmp_path):
    """The layout is that of slime's sources; no real run of it was read."""
    torch = pytest.importorskip("torch")
    sample = {
        "group_index": 3, "index": 0, "prompt": "1+1=", "tokens": [7, 8, 9, 4], "response": "24", "response_length": 2,
        "reward": 1.0, "rollout_log_probs": [-0.5, -0.25], "status": "truncated", "metadata": {},
    }  # fmt: skip
    other = sample | {"reward": {"acc": 0.5}, "rollout_log_probs": None, "tokens": torch.tensor([7, 8, 9, 4])}
    (tmp_path / "rollout_data").mkdir()
    torch.save({"rollout_id": 5, "samples": [sample, other]}, tmp_path / "rollout_data/5.pt")
    torch.save({"rollout_id": 5, "samples": [sample]}, tmp_path / "rollout_data/eval_5.pt")
    first, second = open_run(tmp_path).completions()
    assert (first.step, first.group, first.reward, first.stop_reason) == (5, "5/3", 1.0, "length")
    assert (first.token_ids, first.behavior_logp, first.num_tokens) == ((9, 4), (-0.5, -0.25), 2)
    assert (second.reward, second.rewards, second.behavior_logp) == (None, {"acc": 0.5}, None)


def test_a_fake_dump_of_slime_with_code_in_it_is_not_run(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"rollout_id": 0, "samples": [Owned()]}, tmp_path / "rollout_0.pt")
    with pytest.warns(TrustRLWarning, match="rollout_0.pt"):
        assert list(open_run(tmp_path).completions()) == []
    assert not OWNED


OWNED: list[int] = []


class Owned:
    def __reduce__(self):
        return OWNED.append, (1,)


def test_fake_output_of_prime_rl_has_metrics_and_episodes(tmp_path):
    """The layout is that of prime-rl's and verifiers' sources; no real run of it was read."""
    metrics = {"step": 4, "time": 1.5, "loss/mean": 0.25, "mismatch_kl/all/mean": 0.01, "optim/lr": 1e-6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    nodes = [
        {"parent": None, "message": {"role": "user", "content": "1+1="}, "sampled": False, "token_ids": [1, 2], "mask": [False, False]},
        {
            "parent": 0, "message": {"role": "assistant", "content": "2"}, "sampled": True, "token_ids": [3, 4, 5],
            "mask": [False, True, True], "logprobs": [-0.5, -0.25], "advantages": [1.5, 1.5],
        },
    ]  # fmt: skip
    trace = {"nodes": nodes, "rewards": {"right": {"score": 1.0, "weight": 2.0}, "form": None}, "stop_condition": "eos"}
    episode = {"id": "e", "group": {"id": "g"}, "task": {"key": "t"}, "traces": [trace]}
    file = tmp_path / "rollouts/step_4/train/effective/traces.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(episode) + "\n")
    run = open_run(tmp_path)
    assert run.rows == [{"step": 4, "time": 1.5, "loss": 0.25, "trustrl/kl_k3": 0.01, "learning_rate": 1e-6}]
    (found,) = run.completions()
    assert (found.step, found.group, found.task_id, found.prompt, found.text) == (4, "g", "t", "1+1=", "2")
    assert (found.reward, found.rewards, found.advantage) == (2.0, {"right": 2.0, "form": None}, 1.5)
    assert (found.token_ids, found.behavior_logp, found.stop_reason) == ((4, 5), (-0.5, -0.25), "eos")
