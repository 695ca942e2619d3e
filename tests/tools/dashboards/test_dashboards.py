"""Dashboards of the core metrics: TensorBoard loads the layout, and the packages of W&B and Grafana accept theirs."""

import json
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest

from trustrl.cli import main
from trustrl.core.metrics import CORE
from trustrl.tools.dashboards import DASHBOARDS, sections


def test_every_core_metric_is_in_one_chart():
    shown = [one.label for charts in sections().values() for chart in charts for one in chart.series]
    assert len(shown) == len(set(shown))
    assert set(CORE) < set(shown)


@pytest.mark.parametrize("kind", ["wandb", "grafana"])
def test_the_command_prints_the_file(kind, capfdbinary):
    assert main(["metrics", "--dashboard", kind]) == 0
    said = capfdbinary.readouterr()
    assert said.out == DASHBOARDS[kind]()
    assert said.err == b""


def test_files_are_made_without_torch():
    code = "import sys\nfrom trustrl.cli import main\nmain(['metrics', '--dashboard', 'grafana'])\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A real TensorBoard on a log directory with two runs and the layout; returns a function that reads from it."""
    program = pytest.importorskip("tensorboard.program")
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for run, name in (("trl", "train/trustrl/kl_k3"), ("verl", "actor/trustrl/kl_k3")):
        with tensorboard.SummaryWriter(str(tmp_path / run)) as writer:
            for step in range(3):
                writer.add_scalar(name, step / 4, step)
                writer.add_scalar("train/trustrl/kl_k2", 9.0, step)
    (tmp_path / "events.out.tfevents.0.trustrl").write_bytes(DASHBOARDS["tensorboard"]())
    served = program.TensorBoard()
    served.configure(argv=["tensorboard", "--logdir", str(tmp_path), "--port", "0", "--load_fast", "false"])
    url = served.launch()

    def read(path, **query):
        with urllib.request.urlopen(f"{url}data/plugin/custom_scalars/{path}?{urllib.parse.urlencode(query)}") as reply:
            return json.load(reply)

    return read


def test_tensorboard_loads_the_layout_and_finds_the_metrics_of_both_engines(board):
    layout = {}
    for _ in range(100):
        layout = board("layout")
        if layout:
            break
    titles = {category["title"]: [chart["title"] for chart in category["chart"]] for category in layout["category"]}
    assert titles == {title: [chart.title for chart in charts] for title, charts in sections().items()}
    (kl,) = [chart for one in layout["category"] for chart in one["chart"] if chart["title"] == "KL to the anchor"]
    for run, name in (("trl", "train/trustrl/kl_k3"), ("verl", "actor/trustrl/kl_k3")):
        found = {}
        for tag in kl["multiline"]["tag"]:
            found |= board("scalars", run=run, tag=tag)["tag_to_events"]
        assert {tag: [event[1:] for event in events] for tag, events in found.items()} == {
            name: [[0, 0.0], [1, 0.25], [2, 0.5]]
        }


@pytest.mark.parametrize(("kind", "panel_type", "more"), [("grafana", "trend", 0), ("prometheus", "timeseries", 1)])
def test_grafanas_sdk_knows_every_field(kind, panel_type, more):
    """The SDK's types come from Grafana's schema: a field that they do not have would be lost."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    ours = json.loads(DASHBOARDS[kind]())
    theirs = json.loads(JSONEncoder().encode(models.Dashboard.from_json(ours)))
    filled_in = {"annotations", "fiscalYearStartMonth", "style", "timezone"}
    assert set(theirs) == set(ours) | filled_in
    assert lost(ours, theirs) == []
    assert [panel["type"] for panel in ours["panels"]].count(panel_type) == more + sum(map(len, sections().values()))


def lost(ours, theirs, at=""):
    if isinstance(ours, dict):
        gone = [f"{at}/{key}" for key in ours if key not in theirs]
        return gone + [one for key in ours if key in theirs for one in lost(ours[key], theirs[key], f"{at}/{key}")]
    if isinstance(ours, list):
        assert len(ours) == len(theirs), at
        return [one for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for one in lost(a, b, f"{at}[{i}]")]
    return [] if ours == theirs else [at]


def test_the_comparison_notices_a_field_that_grafana_does_not_have():
    assert lost({"a": 1, "b": [{"c": 2}]}, {"a": 1, "b": [{}]}) == ["/b[0]/c"]


def test_wandb_workspaces_accepts_the_script_up_to_saving(monkeypatch):
    """Saving needs a W&B server."""
    pytest.importorskip("wandb_workspaces.workspaces")
    monkeypatch.setenv("WANDB_MODE", "offline")
    script = {"__name__": "script"}
    exec(compile(DASHBOARDS["wandb"](), "workspace.py", "exec"), script)
    made = script["workspace"]("me", "mine", "train/global_step")._to_model().model_dump(by_alias=True)
    found = made["spec"]["section"]["panelBankConfig"]["sections"]
    drawn = {one["name"]: {p["config"]["chartTitle"]: p["config"]["metrics"] for p in one["panels"]} for one in found}
    assert drawn == {
        title: {chart.title: [name for one in chart.series for name in one.names] for chart in charts}
        for title, charts in sections().items()
    }
    assert {panel["config"]["xAxis"] for one in found for panel in one["panels"]} == {"train/global_step"}
