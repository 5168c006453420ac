"""One OpenTelemetry trace for each job (ADR 0054). The variables OTEL_* switch it on."""

import logging
import os
from typing import TYPE_CHECKING, Final

from ddp_operator.decide.hooks import Feature, Service

if TYPE_CHECKING:
    from ddp_operator.kube.services import ServiceContext

logger = logging.getLogger(__name__)


def start_traces(context: "ServiceContext | None" = None) -> Service | None:
    """Return the export of traces; None: it is off, or not possible, which the log then states with the remedy."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    variable = next((name for name in names if os.environ.get(name)), None)
    if variable is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from ddp_operator.features.tracing.export import connect_traces

        return connect_traces()
    except ImportError as error:
        remedy = f"{error}; install the OpenTelemetry SDK: pip install opentelemetry-exporter-otlp-proto-http"
    except ValueError as error:
        remedy = f"{error}; correct the variables OTEL_*"
    logger.warning("%s is set, but no trace is exported: %s", variable, remedy)
    return None


FEATURE: Final = Feature("tracing", maturity="beta", page="monitoring.md", start=start_traces)
