"""TensorBoard's layout of custom scalars, as an event file. TensorBoard shows it in the tab "Custom Scalars"."""

import io
import re
from typing import Any

from trustrl.optional_imports import need
from trustrl.tools.dashboards.dashboard_charts import Chart, sections

PLUGIN, TAG = "custom_scalars", "custom_scalars__config__"


def layout_events() -> bytes:
    """Returns an event file with the layout. In a log directory, it applies to all runs.

    Raises:
        MissingPackageError: If TensorBoard is not installed.
    """
    event, layouts = _part("compat.proto.event_pb2"), _part("plugins.custom_scalar.layout_pb2")
    layout = layouts.Layout(
        category=[
            layouts.Category(title=title, chart=[_chart(layouts, chart) for chart in charts])
            for title, charts in sections().items()
        ]
    )
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


def _chart(layouts: Any, chart: Chart) -> Any:
    names = [name for series in chart.series for name in series.names]
    tags = [f"^{re.escape(name)}$" for name in names]
    return layouts.Chart(title=chart.title, multiline=layouts.MultilineChartContent(tag=tags))


def _part(module: str) -> Any:
    return need(f"tensorboard.{module}", advice="Run `pip install tensorboard`.")
