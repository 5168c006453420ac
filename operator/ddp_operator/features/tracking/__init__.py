"""``spec.tracking``: all attempts of a job are one run in MLflow, Weights & Biases and TensorBoard (ADR 0027)."""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Status, TrackingStatus
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import State
from ddp_operator.features.tracking.fields import FIELDS, find_run


def record(state: State, status: Status) -> Status:
    """Return the status with the identity of the run, and its links in the report of pod 0."""
    tracking = status.tracking
    page = state.observation.page
    if tracking is None and FIELDS.read(state.spec).tracking is not None:
        tracking = TrackingStatus(run_id=find_run(state.job))
    if tracking is not None and page is not None and page.links:
        tracking = replace(tracking, links=page.links)
    return replace(status, tracking=tracking)


FEATURE: Final = Feature(FIELDS.feature, maturity="beta", page="monitoring.md", fields=FIELDS, record=record)
