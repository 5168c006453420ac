"""Refusals: why a job cannot have its children now. The condition Accepted reports them."""

from ddp_operator.api.cluster_errors import Refused, ServerError
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.decide import conditions as c
from ddp_operator.decide.state import Refusal


def refuse_write(error: Refused) -> Refusal:
    """Return the refusal of a job whose child the API server does not accept."""
    if error.reason == "Invalid":
        return Refusal(c.INVALID_SPEC, error.message)
    return Refusal(c.FORBIDDEN, error.message)


def refuse_failing_server(error: ServerError) -> Refusal:
    """Return the refusal of a job whose child the API server repeatedly fails to create."""
    return Refusal(c.SERVER_ERROR, f"the API server fails to create {error.message}")


def refuse_invalid(error: InvalidManifest, subject: str = "") -> Refusal:
    """Return the refusal of an invalid spec. ``subject``: the object that is invalid, if it is not the job itself."""
    return Refusal(c.INVALID_SPEC, f"{subject}: {error}" if subject else str(error))
