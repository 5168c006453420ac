"""Find what a job's pods depend on before any child is created: its profile.

The operator stores it in the status before it creates any child, and keeps it. Later edits of a profile or of the
operator's defaults do not change a started job. What is missing or invalid becomes a refusal, which the condition
Accepted reports.
"""

from ddp_operator.api.cluster import Cluster, Snapshot
from ddp_operator.api.cluster_errors import Refused, ServerError
from ddp_operator.api.constants import PROFILE_KIND
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_status
from ddp_operator.api.pod_fields import explain_refusal
from ddp_operator.api.profile import profile_reference, read_profile
from ddp_operator.api.status import Profile
from ddp_operator.decide import conditions as c
from ddp_operator.decide.state import Refusal


async def find_profile(cluster: Cluster, snapshot: Snapshot, defaults: Profile | None) -> Profile | Refusal | None:
    """Return the profile of a job, or the refusal if it cannot be read. None: the job has no profile.

    ``defaults``: values for fields that neither the job nor its profile sets. Raises: ClusterError.
    """
    reference = profile_reference(snapshot.resource)
    status = parse_status(snapshot.resource)
    if reference is None:
        return status.profile if status.attempt or snapshot.jobs else defaults

    kind, name = reference
    copy = status.profile
    # If a Job exists without an attempt in the status, a write was lost; the Job was built from this copy.
    if copy is not None and (status.attempt or (snapshot.jobs and (copy.kind, copy.name) == reference)):
        return copy

    namespace = snapshot.resource["metadata"]["namespace"]
    subject = f"spec.profileRef: {kind} {name}"
    try:
        raw = await cluster.profile(kind, namespace, name)
    except Refused as error:
        remedy = "grant the operator get on it (docs/profiles.md)"
        if kind != PROFILE_KIND:
            remedy += f", or name a {PROFILE_KIND} of namespace {namespace}"
        return refuse_read(subject, error, remedy)
    if raw is None:
        where = f" in namespace {namespace}" if kind == PROFILE_KIND else ""
        return Refusal(c.PROFILE_NOT_FOUND, f"{subject} does not exist{where}; create it or correct the name")
    try:
        return read_profile({**raw, "kind": kind}, defaults)
    except InvalidManifest as error:
        return refuse_invalid(error, subject)


def refuse_write(error: Refused) -> Refusal:
    """Return the refusal of a job whose child the API server does not accept."""
    message = explain_refusal(error.message)
    if error.reason == "Invalid":
        return Refusal(c.INVALID_SPEC, message)
    return Refusal(c.FORBIDDEN, message)


def refuse_read(subject: str, error: Refused, remedy: str) -> Refusal:
    """Return the refusal of a job that names an object which the operator may not read."""
    return Refusal(c.FORBIDDEN, f"{subject}: {error.message}; {remedy}")


def refuse_failing_server(error: ServerError) -> Refusal:
    """Return the refusal of a job whose child the API server repeatedly fails to create."""
    return Refusal(c.SERVER_ERROR, f"the API server fails to create {error.message}")


def refuse_invalid(error: InvalidManifest, subject: str = "") -> Refusal:
    """Return the refusal of an invalid spec. ``subject``: the object that is invalid, if it is not the job itself."""
    return Refusal(c.INVALID_SPEC, f"{subject}: {error}" if subject else str(error))
