"""Gauges of OpenTelemetry: the values of the Prometheus text, sent only where the user says."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from support.run_folders import run_folder, steps
from trustrl.cli import main
from trustrl.errors import ConfigError
from trustrl.runs.open_run import open_runs
from trustrl.tools.report.otel_export import HTTP, Gauges, otlp_gauges
from trustrl.tools.report.prometheus_text import samples
from trustrl.tools.report.report_contents import gather

DEAD: dict[str, Any] = {"frac_reward_zero_std": 1.0, "reward": 0.0}


def report_of(*folders):
    return gather(open_runs(folders), max_points=0, max_shown=0)


def read(reader):
    """Every point by name, as labels and value."""
    data = reader.get_metrics_data()
    metrics = [x for resource in data.resource_metrics for scope in resource.scope_metrics for x in scope.metrics]
    return {x.name: [(dict(point.attributes), point.value) for point in x.data.data_points] for x in metrics}


def test_every_sample_of_the_prometheus_text_is_a_point(tmp_path):
    reader = pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    rows = [*steps(7, **DEAD), {"step": 8, "loss": None, "reward": 0.0}]
    report = report_of(run_folder(tmp_path / "a", rows=rows, evaluations=()), run_folder(tmp_path / "b"))
    gauges = Gauges(reader)
    gauges.set(report, 7.5)
    found = read(reader)
    expected = samples(report, 7.5)
    assert expected["loss"][0][1] is None  # the SDK takes no NaN
    finite = {
        f"trustrl.{name}": [(dict(labels), value) for labels, value in values if value is not None]
        for name, values in expected.items()
    }
    assert found == finite
    assert found["trustrl.not_finite"][0][1] == 1
    assert {labels["cause"] for labels, _ in found["trustrl.cause"]} >= {"non-finite values"}
    gauges.close()


def test_a_cause_that_is_gone_has_no_point(tmp_path):
    reader = pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    gauges = Gauges(reader)
    gauges.set(report_of(run_folder(tmp_path / "a", rows=steps(8, **DEAD))), 1.0)
    assert read(reader)["trustrl.cause"]
    gauges.set(report_of(run_folder(tmp_path / "b")), 2.0)
    assert not read(reader).get("trustrl.cause")
    gauges.close()


def test_watch_sends_to_the_collector_that_the_user_names(tmp_path, capsys):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        main(["watch", str(run_folder(tmp_path / "a")), "--otlp", f"http://127.0.0.1:{server.server_port}/v1/metrics"])
    finally:
        server.shutdown()
        server.server_close()
    assert {path for path, _ in received} == {"/v1/metrics"}
    assert any(b"trustrl.kl_k3" in body for _, body in received)


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_address_that_is_not_of_http_is_refused(endpoint):
    with pytest.raises(ConfigError, match="--otlp must be an address of HTTP, got"), otlp_gauges(endpoint):
        pass


def test_a_missing_package_is_named_once_with_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, HTTP, None)
    code = main(["watch", str(run_folder(tmp_path / "a")), "--otlp", "http://localhost:4318/v1/metrics"])
    said = capsys.readouterr()
    assert (code, said.out) == (1, "")
    assert said.err.count('pip install "trustrl[otel]"') == len(said.err.splitlines()) == 1
