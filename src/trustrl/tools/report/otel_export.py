"""Runs as gauges of OpenTelemetry, sent to a collector that the user names. Listens on nothing."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from trustrl import __version__
from trustrl.errors import ConfigError
from trustrl.optional_imports import need
from trustrl.tools.report.prometheus_text import ABOUT, Sample, samples
from trustrl.tools.report.report_contents import Report

SDK, HTTP = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http.metric_exporter"


class Gauges:
    """Gauges `trustrl.<name>` with the values of the last report. A cause that is gone has no value."""

    def __init__(self, reader: Any):
        """Creates a provider with one reader, a `MetricReader` of the SDK."""
        resource = need(f"{SDK}.resources", extra="otel").Resource.create({"service.name": "trustrl"})
        self._provider = need(f"{SDK}.metrics", extra="otel").MeterProvider([reader], resource)
        self._meter = self._provider.get_meter("trustrl", __version__)
        self._samples: Mapping[str, list[Sample]] = {}
        self._known: set[str] = set()

    def set(self, report: Report, changed: float) -> None:
        """Sends the values of a report: those of `prometheus_text`."""
        self._samples = samples(report, changed)
        for name in self._samples.keys() - self._known:
            self._meter.create_observable_gauge(f"trustrl.{name}", [self._reads(name)], description=ABOUT[name])
            self._known.add(name)
        self._provider.force_flush()

    def close(self) -> None:
        """Sends the last values once more and ends the exporter."""
        self._provider.shutdown()

    def _reads(self, name: str) -> Any:
        observation = need("opentelemetry.metrics", extra="otel").Observation

        def read(_: Any) -> Iterable[Any]:
            for labels, value in self._samples.get(name, ()):
                if value is not None and math.isfinite(value):  # the SDK takes no others; `not_finite` counts them
                    yield observation(float(value), dict(labels))

        return read


@contextmanager
def otlp_gauges(endpoint: str) -> Iterator[Gauges]:
    """Context manager that yields gauges which are sent by OTLP over HTTP after each report, and never in between.

    Args:
        endpoint: The full address, such as `http://localhost:4318/v1/metrics`.

    Raises:
        ConfigError: If the endpoint is not an address of HTTP.
        MissingPackageError: If the extra `otel` is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp must be an address of HTTP, got {endpoint}. Write http://HOST:4318/v1/metrics for a collector."
        )
    exporter = need(HTTP, extra="otel").OTLPMetricExporter(endpoint=endpoint)
    reader = need(f"{SDK}.metrics.export", extra="otel").PeriodicExportingMetricReader(exporter, math.inf)
    gauges = Gauges(reader)
    try:
        yield gauges
    finally:
        gauges.close()
