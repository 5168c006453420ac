"""Export of one OpenTelemetry trace for each job (ADR 0054). Importing it needs the extra ``otel``."""

import asyncio
import logging
import threading
from datetime import datetime
from hashlib import sha256
from typing import Final
from uuid import UUID

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, StatusCode, TraceFlags
from opentelemetry.trace import Status as SpanStatus

from ddp_operator._version import __version__
from ddp_operator.api.cluster import Snapshot
from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Service
from ddp_operator.features.tracing.spans import JOB, Span, list_spans

_SECONDS_TO_FLUSH: Final = 3.0
_SECONDS_BETWEEN_ERRORS: Final = 60.0
_SCOPE: Final = InstrumentationScope("ddp_operator", __version__)


class JobTraces(Service):
    """Builds spans and hands them to the SDK's processor, which exports them in its own thread."""

    def __init__(self, processor: SpanProcessor) -> None:
        service = Resource({SERVICE_NAME: "ddp-operator", SERVICE_VERSION: __version__})
        self._resource = service.merge(OTELResourceDetector().detect())
        self._processor = processor

    def note_status(self, snapshot: Snapshot, old: Status, new: Status, now: datetime) -> None:
        """Export the spans that end where ``new`` replaces ``old``."""
        trace = UUID(snapshot.resource["metadata"]["uid"]).int
        for span in list_spans(snapshot, old, new, now):
            self._processor.on_end(self._build(trace, span))

    def _build(self, trace: int, span: Span) -> ReadableSpan:
        """Return a span of the SDK. ``trace``: the job's UID, so that every log with the UID leads to the trace."""
        root = SpanContext(trace, trace & (1 << 64) - 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        digest = sha256(f"{trace} {span.name} {span.start.isoformat()}".encode()).digest()
        own = SpanContext(trace, int.from_bytes(digest[:8]), is_remote=False, trace_flags=root.trace_flags)
        is_job = span.name == JOB
        return ReadableSpan(
            span.name,
            root if is_job else own,
            None if is_job else root,
            self._resource,
            span.attributes,
            status=SpanStatus(StatusCode.ERROR, span.error) if span.error else SpanStatus(),
            start_time=int(span.start.timestamp() * 1e9),
            end_time=int(span.end.timestamp() * 1e9),
            instrumentation_scope=_SCOPE,
        )

    async def close(self) -> None:
        """Export what is queued, in a bounded time: the SDK itself may wait for 30 s."""
        thread = threading.Thread(target=self._processor.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _SECONDS_TO_FLUSH)


class RareErrors(logging.Filter):
    """Passes one record a minute: an absent receiver fails every batch."""

    _due = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a minute has passed since the last record."""
        is_due = record.created >= self._due
        if is_due:
            self._due = record.created + _SECONDS_BETWEEN_ERRORS
        return is_due


def connect_traces() -> JobTraces:
    """Return the export that the variables OTEL_* configure. Its queue is bounded. Raises: ValueError."""
    exporter = trace_exporter.OTLPSpanExporter()
    logging.getLogger(trace_exporter.__name__).addFilter(RareErrors())
    return JobTraces(BatchSpanProcessor(exporter))
