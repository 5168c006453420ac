"""Objects of other owners that features read for a job. Pure."""

from ddp_operator.api.cluster_errors import Refused
from ddp_operator.decide import conditions as c
from ddp_operator.decide.state import Refusal


def refuse_read(subject: str, error: Refused, remedy: str) -> Refusal:
    """Return the refusal of a job that names an object which the operator may not read."""
    return Refusal(c.FORBIDDEN, f"{subject}: {error.message}; {remedy}")
