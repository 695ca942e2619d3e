"""Dashboards of the core metrics for TensorBoard, W&B and Grafana, made from the metric dictionary."""

from collections.abc import Callable

from trustrl.tools.dashboards.grafana_dashboard import grafana_json
from trustrl.tools.dashboards.tensorboard_layout import layout_events
from trustrl.tools.dashboards.wandb_workspace import workspace_script

__all__ = ["DASHBOARDS"]

DASHBOARDS: dict[str, Callable[[], bytes]] = {
    "tensorboard": layout_events,
    "wandb": workspace_script,
    "grafana": grafana_json,
}
"""The content of each dashboard's file."""
