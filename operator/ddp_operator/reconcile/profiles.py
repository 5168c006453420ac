"""Which profile a job has: the one that it has taken, or takes now.

A job takes a copy into its status before anything is made of it, and keeps that one: what is edited in a profile, or
that it is deleted, changes no job that has started.
"""

from collections.abc import Sequence

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.parse import parse_status
from ddp_operator.api.profile import profile_reference, read_profile
from ddp_operator.api.status import Profile
from ddp_operator.cluster import Cluster, Refused, Snapshot
from ddp_operator.constants import PROFILE_KIND
from ddp_operator.status import conditions as c
from ddp_operator.status.decision import Refusal


async def find_profile(cluster: Cluster, snapshot: Snapshot) -> Profile | Refusal | None:
    """Return the profile of a job, or why it has to wait for it; None: it names none. Raises: ClusterError."""
    reference = profile_reference(snapshot.resource)
    if reference is None:
        return None
    (kind, name), status = reference, parse_status(snapshot.resource)
    # A Job without an attempt in status: that one was lost, and the Job was made with this copy.
    taken = status.profile
    if taken is not None and (status.attempt or (snapshot.jobs and (taken.kind, taken.name) == reference)):
        return taken
    namespace = snapshot.resource["metadata"]["namespace"]
    what = f"spec.profileRef: {kind} {name}"
    try:
        raw = await cluster.profile(kind, namespace, name)
    except Refused as error:
        hint = "" if kind == PROFILE_KIND else f", or name a {PROFILE_KIND} of namespace {namespace}"
        return Refusal(c.FORBIDDEN, f"{what}: {error.message}; let the operator get it (docs/profiles.md){hint}")
    if raw is None:
        where = f" in namespace {namespace}" if kind == PROFILE_KIND else ""
        message = f"{what} does not exist{where}; the job starts once it does, or when another is named"
        return Refusal(c.PROFILE_NOT_FOUND, message)
    try:
        return read_profile({**raw, "kind": kind})
    except InvalidManifest as error:
        return Refusal(c.INVALID_SPEC, f"{what}: {error}")


def refuse_changes(locked: Sequence[FieldError]) -> Refusal | None:
    """Return the refusal of a spec that sets fields which its profile has locked."""
    return Refusal(c.PROFILE_LOCKED, "\n".join(map(str, locked))) if locked else None
