"""A status that the API server refuses: as invalid, by an older definition, or as too large. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact, set_conditions

_MAX_TEXT: Final = 256
_REMEDY: Final = (
    "Apply the definitions of this operator's version (deploy/crds); where the object is too large, shorten "
    "spec.template and the annotations"
)


def shorten_status(status: Status) -> Status:
    """Return a status without what nobody decides on, and with short texts."""
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
        conditions=tuple(replace(one, message=one.message[:_MAX_TEXT]) for one in status.conditions),
    )


def describe_refused_status(message: str) -> str:
    """Return the message of the condition and of the Event."""
    return f"the API server refuses the job's status, so that nothing is done for the job: {message[:512]}. {_REMEDY}"


def report_refused_status(old: Status, message: str, resource: Mapping[str, Any], now: datetime) -> Status:
    """Return the stored status with Accepted=False alone, which the API server took when it was written."""
    fact = Fact(c.ACCEPTED, "False", c.STATUS_REFUSED, describe_refused_status(message))
    return set_conditions(old, [fact], now, (resource.get("metadata") or {}).get("generation") or 0)
