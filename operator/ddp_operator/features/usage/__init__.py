"""The GPU-seconds of a job by purpose, its goodput, and ``spec.idle``."""

from typing import Final

from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import State
from ddp_operator.features.usage.accounting import add_usage
from ddp_operator.features.usage.goodput import record, record_final
from ddp_operator.features.usage.idle import FIELDS, IDLE, review


def account(state: State, status: Status) -> Status:
    """Return the status, which is about to be written, with the final goodput and the GPU-seconds since the last."""
    return add_usage(state, record_final(state, status))


FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="beta",
    page="effective-time.md",
    fields=FIELDS,
    conditions={IDLE: "False"},
    review=review,
    record=record,
    account=account,
)
