"""A status that the API server refuses: invalid, unknown to an older CRD, or too large. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, set_conditions

_MAX_TEXT: Final = 256
_REMEDY: Final = (
    "Apply the CRDs of this operator's version (deploy/crds); if the object is too large, shorten spec.template and "
    "its annotations"
)


def shorten_status(status: Status) -> Status:
    """Return a status without the fields on which no decision depends, and with short texts."""
    failure = status.last_failure
    if failure is not None:
        message = failure.message[:_MAX_TEXT]
        failure = replace(failure, message=message, traceback="", hint=failure.hint[:_MAX_TEXT])
    return replace(
        status,
        history=None,
        tracking=None,
        stragglers=(),
        last_failure=failure,
        conditions=tuple(replace(item, message=item.message[:_MAX_TEXT]) for item in status.conditions),
    )


def describe_refused_status(message: str) -> str:
    """Return the message of the condition and of the Event."""
    return f"the API server refuses the job's status, so the operator cannot handle the job: {message[:512]}. {_REMEDY}"


def report_refused_status(old: Status, message: str, resource: Mapping[str, Any], now: datetime) -> Status:
    """Return the stored status with Accepted=False: the API server has accepted the rest of it before."""
    fact = Fact(c.ACCEPTED, "False", c.STATUS_REFUSED, describe_refused_status(message))
    return set_conditions(old, [fact], now, (resource.get("metadata") or {}).get("generation") or 0)
