"""Dashboards of the core metrics for TensorBoard, W&B and Grafana, made from the metric dictionary.

TensorBoard shows a layout of custom scalars in the tab "Custom Scalars". W&B has no file format to import, so a script
saves a workspace with the package wandb-workspaces. Grafana shows data of databases, and MLflow on PostgreSQL is the
only tracker of a recipe that keeps its metrics in one.
"""

import io
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from trustrl.core.metrics import METRICS
from trustrl.optional_imports import need

PREFIXES = ("train/", "actor/", "")
"""Prefixes of trustrl's metrics: TRL's trackers, verl's trackers, and TRL on MLflow."""


class Series(NamedTuple):
    """One line of a chart."""

    label: str
    names: tuple[str, ...]
    """Names that engines log it under. A run has one of them."""


class Chart(NamedTuple):
    """One chart of a dashboard."""

    title: str
    about: str
    """Healthy range and recommended action."""

    series: tuple[Series, ...]

    @property
    def names(self) -> list[str]:
        """Names of all its lines."""
        return [name for line in self.series for name in line.names]


def sections() -> dict[str, list[Chart]]:
    """Returns the charts by section. Every core metric is in one of them."""
    return {
        "Learning": [
            Chart(
                "Reward", "Mean over the completions of a batch.",
                (Series("reward", ("train/reward", "critic/score/mean", "reward")),),
            ),
            Chart(
                "Gradient norm", "Before clipping.",
                (Series("grad_norm", ("train/grad_norm", "actor/grad_norm", "grad_norm")),),
            ),
            _chart("Entropy", "entropy"),
        ],
        "Region": [
            _chart("Tokens masked or projected", "masked_share", "projected_share"),
            _chart("Divergence from the anchor", "divergence_mean", "divergence_p99"),
            _chart("KL to the anchor", "kl_k3"),
            _chart("Tokens that K cannot decide", "undecided_share"),
        ],
        "Sampler and trainer": [
            _chart("Mismatch", "mismatch_abs_mean"),
            _chart("Mismatch ratio", "mismatch_ratio_mean"),
            _chart("Staleness", "staleness_mean"),
            _chart("Dropped tokens", "dropped_share"),
        ],
    }  # fmt: skip


def _chart(title: str, *names: str) -> Chart:
    first = next(metric for metric in METRICS if metric.name == names[0])
    about = f"{first.formula}, in {first.unit}. Healthy: {first.healthy}. {first.action}"
    return Chart(title, about, tuple(Series(name, tuple(f"{p}trustrl/{name}" for p in PREFIXES)) for name in names))


SOURCE = "grafana-postgresql-datasource"
_SOURCE = {"type": SOURCE, "uid": "${mlflow}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8

RUNS = """SELECT r.name AS __text, r.run_uuid AS __value
FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id
WHERE e.name = 'trustrl' ORDER BY r.start_time DESC"""
"""Names and ids of the runs, for the dashboard's variable `run`."""


ALERTS = """groups:
- name: trustrl
  rules:
  - alert: TrustRLCauseFound
    expr: trustrl_cause{kind="cause"} >= 0.7
    for: 2m
    labels: {severity: page}
    annotations: {summary: "{{ $labels.run }}: {{ $labels.cause }}"}
  - alert: TrustRLCollapsed
    expr: trustrl_collapsed == 1
    for: 2m
    labels: {severity: page}
    annotations: {summary: "{{ $labels.run }} collapsed"}
  - alert: TrustRLNotFinite
    expr: trustrl_not_finite > 0
    labels: {severity: page}
    annotations: {summary: "{{ $labels.run }}: {{ $value }} metrics are not finite"}
  - alert: TrustRLStalled
    expr: trustrl_running == 1 and time() - trustrl_last_change_timestamp_seconds > 1800
    labels: {severity: ticket}
    annotations: {summary: "{{ $labels.run }} has written nothing for half an hour"}
"""
"""Alert rules of Prometheus on the metrics that `trustrl watch --prometheus` writes."""

PROMETHEUS = "prometheus"
_SCRAPED = {"type": PROMETHEUS, "uid": "${prometheus}"}


def prometheus_json() -> bytes:
    """Returns a Grafana dashboard that reads the metrics of `trustrl watch --prometheus` from Prometheus."""

    def panel(chart: Chart) -> dict[str, Any]:
        targets = [
            {"refId": chr(65 + place), "datasource": _SCRAPED, "expr": f'trustrl_{line.label}{{run=~"$run"}}',
             "legendFormat": f"{{{{run}}}} {line.label}"}
            for place, line in enumerate(chart.series)
        ]  # fmt: skip
        return {"type": "timeseries", "datasource": _SCRAPED, "targets": targets}

    causes = Chart("Causes", "Confidence of each cause that `trustrl explain` names.", (Series("cause", ()),))
    variables = [
        {"type": "datasource", "name": PROMETHEUS, "label": "Prometheus", "query": PROMETHEUS},
        {"type": "query", "name": "run", "label": "Run", "datasource": _SCRAPED, "refresh": 2, "multi": True,
         "includeAll": True, "query": "label_values(trustrl_step, run)"},
    ]  # fmt: skip
    return _dashboard("trustrl-prometheus", {"Diagnosis": [causes], **sections()}, panel, variables)


def grafana_json() -> bytes:
    """Returns a dashboard as JSON for Grafana's import. It reads MLflow's database through the PostgreSQL source."""

    def panel(chart: Chart) -> dict[str, Any]:
        target = {"refId": "A", "datasource": _SOURCE, "format": "table", "rawQuery": True, "rawSql": query(chart)}
        return {"type": "trend", "datasource": _SOURCE, "targets": [target], "options": {"xField": "step"}}

    variables = [
        {"type": "datasource", "name": "mlflow", "label": "MLflow's database", "query": SOURCE},
        {"type": "query", "name": "run", "label": "Run", "datasource": _SOURCE, "query": RUNS, "refresh": 2},
    ]
    return _dashboard("trustrl-core", sections(), panel, variables)


def _dashboard(
    uid: str, shown: dict[str, list[Chart]], panel: Callable[[Chart], dict[str, Any]], variables: list[dict[str, Any]]
) -> bytes:
    """Lays the panels of all charts out in rows."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, charts in shown.items():
        panels.append(
            {
                "id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                "gridPos": {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1},
            }
        )  # fmt: skip
        for place, chart in enumerate(charts):
            row, column = divmod(place, COLUMNS)
            where = {"x": column * WIDTH, "y": top + 1 + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            about = {"id": len(panels) + 1, "title": chart.title, "description": chart.about, "gridPos": where}
            panels.append(about | panel(chart))
        top += 1 + -(-len(charts) // COLUMNS) * HEIGHT
    dashboard = {
        "uid": uid, "title": "trustrl", "tags": ["trustrl"], "editable": True, "schemaVersion": 39,
        "graphTooltip": 1, "refresh": "1m", "time": {"from": "now-6h", "to": "now"}, "panels": panels,
        "templating": {"list": variables},
    }  # fmt: skip
    return (json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n").encode()


def query(chart: Chart) -> str:
    """Returns the SQL of a chart: one row for each step of the chosen run, one column for each series."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"'{name}'" for name in names)

    columns = [f"MAX(CASE WHEN key IN ({listed(line.names)}) THEN value END) AS {line.label}" for line in chart.series]
    return (
        f"SELECT step, {', '.join(columns)} FROM metrics WHERE run_uuid = '$run' AND NOT is_nan AND key IN "
        f"({listed(chart.names)}) GROUP BY step ORDER BY step"
    )


PLUGIN, TAG = "custom_scalars", "custom_scalars__config__"


def layout_events() -> bytes:
    """Returns an event file with the layout. In a log directory, it applies to all runs.

    Raises:
        MissingPackageError: If TensorBoard is not installed.
    """
    event, layouts = _part("compat.proto.event_pb2"), _part("plugins.custom_scalar.layout_pb2")
    layout = layouts.Layout()
    for title, charts in sections().items():
        category = layout.category.add(title=title)
        for chart in charts:
            tags = [f"^{re.escape(name)}$" for name in chart.names]
            category.chart.add(title=chart.title, multiline=layouts.MultilineChartContent(tag=tags))
    tensors, summaries = _part("compat.proto.tensor_pb2"), _part("compat.proto.summary_pb2")
    plugin = summaries.SummaryMetadata.PluginData(plugin_name=PLUGIN)
    value = summaries.Summary.Value(
        tag=TAG,
        metadata=summaries.SummaryMetadata(plugin_data=plugin),
        tensor=tensors.TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()]),
    )
    file = io.BytesIO()
    records = _part("summary.writer.record_writer").RecordWriter(file)
    records.write(event.Event(file_version="brain.Event:2").SerializeToString())
    records.write(event.Event(summary=summaries.Summary(value=[value])).SerializeToString())
    return file.getvalue()


def _part(module: str) -> Any:
    return need(f"tensorboard.{module}", advice="Run `pip install tensorboard`.")


SCRIPT = '''"""Saves the workspace `trustrl` in a W&B project: python FILE ENTITY PROJECT [X]. Needs wandb-workspaces.

X is the metric of the x-axis, "Step" by default. Runs of TRL have their updates in "train/global_step".
"""

import sys

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws


def workspace(entity, project, x="Step"):
    return ws.Workspace(
        entity=entity,
        project=project,
        name="trustrl",
        sections=[
{sections}
        ],
    )


if __name__ == "__main__":
    print(workspace(*sys.argv[1:4]).save().url)
'''


def workspace_script() -> bytes:
    """Returns the script's source."""
    lines = []
    for title, charts in sections().items():
        lines += ["            ws.Section(", f"                name={title!r},", "                is_open=True,"]
        lines += ["                panels=["]
        lines += [f"{' ' * 20}wr.LinePlot(title={chart.title!r}, x=x, y={chart.names!r})," for chart in charts]
        lines += ["                ],", "            ),"]
    return SCRIPT.format(sections="\n".join(lines)).encode()


DASHBOARDS: dict[str, Callable[[], bytes]] = {
    "tensorboard": layout_events,
    "wandb": workspace_script,
    "grafana": grafana_json,
    "prometheus": prometheus_json,
    "alerts": ALERTS.encode,
}
"""The content of each dashboard's file."""
