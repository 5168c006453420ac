"""What a receiver of OTLP over HTTP gets from the operator, decoded by OpenTelemetry's own schema."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from uuid import UUID

import pytest
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ddp_operator.api.cluster import Snapshot
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Condition, Status
from ddp_operator.decide import conditions as c
from ddp_operator.features.tracing.export import connect_traces
from tests.support.builders import NOW, UID, resource


class Receiver(ThreadingHTTPServer):
    """Accepts OTLP on a free port of this machine, or refuses everything with ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code = code
        self.requests: list[tuple[str, str | None, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, self.headers["Content-Type"], body))
        self.send_response(self.server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receive(monkeypatch: pytest.MonkeyPatch, code: int = 200) -> Iterator[Receiver]:
    receiver = Receiver(code)
    Thread(target=receiver.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()


SUCCEEDED = Status(
    attempt=1,
    job_name="train-1",
    phase="Succeeded",
    conditions=(Condition(type=c.SUCCEEDED, status="True", reason="R", last_transition_time=NOW),),
).remember(nodes=2)


def observe() -> Snapshot:
    raw = resource()
    raw["metadata"] |= {"uid": UID, "creationTimestamp": format_time(NOW)}
    return Snapshot(raw)


async def test_receiver_gets_job_by_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=east")
    with receive(monkeypatch) as receiver:
        traces = connect_traces()
        traces.note_status(observe(), Status(attempt=1, job_name="train-1"), SUCCEEDED, NOW)
        await traces.close()
    [(path, kind, body)] = receiver.requests
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")

    [sent] = ExportTraceServiceRequest.FromString(body).resource_spans
    origin = {item.key: item.value.string_value for item in sent.resource.attributes}
    assert (origin["service.name"], origin["k8s.cluster.name"]) == ("training", "east")
    [scope] = sent.scope_spans
    [span] = scope.spans
    assert (scope.scope.name, span.name) == ("ddp_operator", "job")
    assert (span.trace_id, span.span_id) == (UUID(UID).bytes, UUID(UID).bytes[8:])
    assert span.start_time_unix_nano == int(NOW.timestamp()) * 10**9
    values = {item.key: item.value.string_value or item.value.int_value for item in span.attributes}
    assert (values["ddp.job.name"], values["ddp.phase"], values["ddp.attempt"]) == ("train", "Succeeded", 1)


async def test_refusing_receiver_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger(trace_exporter.__name__), "filters", [])
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with receive(monkeypatch, code=400) as receiver, caplog.at_level(logging.WARNING):
        traces = connect_traces()
        for _ in range(3):
            traces.note_status(observe(), Status(attempt=1, job_name="train-1"), SUCCEEDED, NOW)
        await traces.close()
    assert len(receiver.requests) == 3
    assert ["Failed to export spans" in record.getMessage() for record in caplog.records] == [True]
