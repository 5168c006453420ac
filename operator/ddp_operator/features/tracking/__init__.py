"""``spec.tracking``: all attempts of a job are one run in MLflow, Weights & Biases and TensorBoard (ADR 0027)."""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Status, TrackingStatus
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.report import Page
from ddp_operator.decide.state import State
from ddp_operator.features.tracking.fields import FIELDS, find_run
from ddp_operator.reading.parts import read_report_part


def record(state: State, status: Status) -> Status:
    """Return the status with the identity of the run, and its links in the report of pod 0."""
    tracking = status.tracking
    page = state.observation.page
    if tracking is None and FIELDS.read(state.spec).tracking is not None:
        tracking = TrackingStatus(run_id=find_run(state.job))
    links = () if page is None else list_links(page)
    if tracking is not None and links:
        tracking = replace(tracking, links=links)
    return replace(status, tracking=tracking)


def list_links(page: Page) -> tuple[str, ...]:
    """Return the URLs of the run in experiment trackers."""
    runs = read_report_part(page, "runs").runs
    return tuple(run.url for run in runs if run.url.startswith(("http://", "https://")))


FEATURE: Final = Feature(FIELDS.feature, maturity="beta", page="monitoring.md", fields=FIELDS, record=record)
