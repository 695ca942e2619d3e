"""A Grafana dashboard that reads MLflow's database through Grafana's PostgreSQL data source.

Grafana shows data of databases, and MLflow on PostgreSQL is the one tracker of a recipe that keeps its metrics in one.
"""

import json
from typing import Any

from trustrl.tools.dashboards.dashboard_charts import Chart, sections

SOURCE = "grafana-postgresql-datasource"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8

RUNS = """SELECT r.name AS __text, r.run_uuid AS __value
FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id
WHERE e.name = 'trustrl' ORDER BY r.start_time DESC"""
"""Names and ids of the runs, for the dashboard's variable `run`."""


def grafana_json() -> bytes:
    """Returns the dashboard as JSON for Grafana's import."""
    panels, top = [], 0
    for title, charts in sections().items():
        panels.append(
            {
                "id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                "gridPos": {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1},
            }
        )  # fmt: skip
        for at, chart in enumerate(charts):
            row, column = divmod(at, COLUMNS)
            where = {"x": column * WIDTH, "y": top + 1 + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, chart, where))
        top += 1 + -(-len(charts) // COLUMNS) * HEIGHT
    dashboard = {
        "uid": "trustrl-core", "title": "trustrl", "tags": ["trustrl"], "editable": True, "schemaVersion": 39,
        "graphTooltip": 1, "refresh": "1m", "time": {"from": "now-6h", "to": "now"}, "panels": panels,
        "templating": {"list": [
            {"type": "datasource", "name": "mlflow", "label": "MLflow's database", "query": SOURCE},
            {"type": "query", "name": "run", "label": "Run", "datasource": _SOURCE, "query": RUNS, "refresh": 2},
        ]},
    }  # fmt: skip
    return (json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n").encode()


_SOURCE = {"type": SOURCE, "uid": "${mlflow}"}


def _panel(number: int, chart: Chart, where: dict[str, int]) -> dict[str, Any]:
    target = {"refId": "A", "datasource": _SOURCE, "format": "table", "rawQuery": True, "rawSql": query(chart)}
    return {
        "id": number, "type": "trend", "title": chart.title, "description": chart.about, "gridPos": where,
        "datasource": _SOURCE, "targets": [target], "options": {"xField": "step"},
    }  # fmt: skip


def query(chart: Chart) -> str:
    """Returns the SQL of a chart: one row for each step of the chosen run, one column for each series."""
    columns = [f"MAX(CASE WHEN key IN ({_listed(one.names)}) THEN value END) AS {one.label}" for one in chart.series]
    every = _listed([name for one in chart.series for name in one.names])
    return (
        f"SELECT step, {', '.join(columns)} FROM metrics WHERE run_uuid = '$run' AND NOT is_nan AND key IN ({every}) "
        "GROUP BY step ORDER BY step"
    )


def _listed(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)
