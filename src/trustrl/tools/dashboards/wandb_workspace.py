"""A script that saves a W&B workspace with the package wandb-workspaces. W&B has no file format to import."""

from trustrl.tools.dashboards.dashboard_charts import Chart, sections

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
    return SCRIPT.format(sections="\n".join(_section(title, charts) for title, charts in sections().items())).encode()


def _section(title: str, charts: list[Chart]) -> str:
    lines = ((chart.title, [name for one in chart.series for name in one.names]) for chart in charts)
    panels = "\n".join(f"{' ' * 20}wr.LinePlot(title={title!r}, x=x, y={names!r})," for title, names in lines)
    return (
        f"            ws.Section(\n                name={title!r},\n                is_open=True,\n"
        f"                panels=[\n{panels}\n                ],\n            ),"
    )
