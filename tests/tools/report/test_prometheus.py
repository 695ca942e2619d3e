"""The text file for node exporter: Prometheus' format, written whole, without a socket."""

import json
import re
import socket

import pytest

from support.run_folders import run_folder, steps
from trustrl.cli import main
from trustrl.runs.open_run import open_runs
from trustrl.tools.dashboards import ALERTS, DASHBOARDS
from trustrl.tools.report.prometheus_text import prometheus_text
from trustrl.tools.report.report_contents import gather

SAMPLE = re.compile(
    r'(trustrl_[a-z0-9_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (NaN|[-+]?[0-9.]+(?:e[-+]?\d+)?)'
)


def samples(text):
    """Every sample; each line must be one, or a comment about its family."""
    found = {}
    for line in text.splitlines():
        if line.startswith(("# HELP trustrl_", "# TYPE trustrl_")):
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        labels = dict(re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', match[2]))
        found.setdefault(match[1], []).append((labels, float(match[3])))
    assert text.endswith("\n")
    assert len(re.findall("# TYPE (trustrl_[a-z0-9_]+) gauge", text)) == len(found)
    return found


def of(*folders, changed=7.5):
    return samples(prometheus_text(gather(open_runs(folders), max_points=0, max_shown=0), changed))


def test_the_newest_values_and_the_causes_are_in_it(tmp_path):
    equal = steps(8, frac_reward_zero_std=1.0, reward=0.0)
    found = of(run_folder(tmp_path / "a", name="s-a", rows=equal), run_folder(tmp_path / "b", name="s-b"))
    assert [value for _, value in found["trustrl_step"]] == [8, 8]
    assert [value for _, value in found["trustrl_kl_k3"]] == [0.001, 0.001]
    assert found["trustrl_reward"][1] == ({"run": "b"}, 1.0)
    assert found["trustrl_running"][0][1] == 0
    assert found["trustrl_last_change_timestamp_seconds"][0][1] == 7.5
    ((labels, score),) = found["trustrl_cause"]
    assert (labels["run"], labels["cause"], labels["kind"], score) == ("a", "no learning signal", "symptom", 1.0)


def test_values_that_are_not_finite_are_nan_and_counted(tmp_path):
    found = of(run_folder(tmp_path / "a", rows=[*steps(7), {"step": 8, "loss": None, "reward": 0.5}], evaluations=()))
    assert found["trustrl_loss"][0][1] != found["trustrl_loss"][0][1]
    assert found["trustrl_not_finite"][0][1] == 1
    assert found["trustrl_collapsed"][0][1] == 1


def test_a_hostile_name_stays_one_label(tmp_path):
    found = of(run_folder(tmp_path / "a", name='x"} 1\n\\\u202e'))
    assert len(found["trustrl_step"]) == 1


def test_watch_writes_it_whole_and_opens_no_socket(tmp_path, monkeypatch, capsys):
    def refused(*arguments, **settings):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refused)
    file = tmp_path / "metrics" / "trustrl.prom"
    assert main(["watch", str(run_folder(tmp_path / "a")), "--every", "0.1", "--prometheus", str(file)]) == 0
    assert samples(file.read_text(encoding="utf-8"))["trustrl_step"][0][1] == 8
    assert [path.name for path in file.parent.iterdir()] == ["trustrl.prom"]


def test_a_name_that_the_collector_skips_is_refused(tmp_path, capsys):
    assert main(["watch", str(run_folder(tmp_path / "a")), "--prometheus", str(tmp_path / "a.txt")]) == 2
    assert "--prometheus must end with .prom" in capsys.readouterr().err


def expressions():
    dashboard = json.loads(DASHBOARDS["prometheus"]())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [*panels, *re.findall(r"expr: (.*)", ALERTS)]


def test_dashboard_and_alerts_read_metrics_that_are_written(tmp_path):
    everything = run_folder(tmp_path / "a", rows=steps(8, frac_reward_zero_std=1.0, reward=0.0))
    text = prometheus_text(gather(open_runs([everything]), max_points=0, max_shown=0), 0.0)
    known = {*samples(text)} | {f"trustrl_{name}" for name in core_metrics()}
    read = {name for expression in expressions() for name in re.findall(r"trustrl_[a-z0-9_]+", expression)}
    assert read <= known
    assert ALERTS.count("- alert: ") == 4


def core_metrics():
    from trustrl.core.metrics import METRICS

    return [metric.name for metric in METRICS]


@pytest.mark.parametrize("kind", ["prometheus", "alerts"])
def test_the_command_prints_the_file(kind, capfdbinary):
    assert main(["metrics", "--dashboard", kind]) == 0
    assert capfdbinary.readouterr().out == DASHBOARDS[kind]()
