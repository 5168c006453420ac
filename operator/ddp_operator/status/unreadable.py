"""The status of a resource whose spec this version of the operator cannot read: an older or newer CRD let it in."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from ddp_operator import __version__, constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.status import Status
from ddp_operator.status import conditions as c
from ddp_operator.status.decide import is_finished
from ddp_operator.status.reason import take_facts

_REMEDY = (
    f"the definition {constants.CRD_NAME} in the cluster is not that of this operator (version {__version__}): upgrade "
    "the operator, or apply the definition of its version"
)
_UNATTENDED = "the job's pods keep running, but no failure, suspension or change of size is handled"


def report_unreadable(resource: Mapping[str, Any], error: InvalidManifest, now: datetime) -> tuple[Status, Status]:
    """Return the status as it is, and with Accepted=False in it; a job that has ended keeps its own."""
    try:
        old = msgspec.convert(resource.get("status") or {}, Status)
    except msgspec.ValidationError:
        old = Status()
    if is_finished(old):
        return old, old
    message = f"{error}; {_REMEDY}" + (f"; until then {_UNATTENDED}" if old.attempt else "")
    fact = c.Fact(c.ACCEPTED, "False", c.VERSION_MISMATCH, message)
    generation = (resource.get("metadata") or {}).get("generation") or 0
    new = msgspec.structs.replace(old, phase=old.phase if old.attempt else "Rejected")
    return old, take_facts(new, [fact], now, generation)
