"""Which profile a job has: the one that it has taken, or takes now.

A job takes a copy into its status before anything is made of it, and keeps that one: what is edited in a profile or
in the operator's defaults, or that a profile is deleted, changes no job that has started.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddp_operator.api.errors import FieldError, InvalidManifest, unknown_member
from ddp_operator.api.parse import parse_resource, parse_status
from ddp_operator.api.profile import profile_reference, read_profile
from ddp_operator.api.status import Profile
from ddp_operator.cluster import Cluster, Refused, Snapshot
from ddp_operator.constants import JOB_DEFAULTS, PROFILE_KIND
from ddp_operator.manifests.template import check_network_policy
from ddp_operator.status import conditions as c
from ddp_operator.status.decision import Refusal


def read_job_defaults(given: Mapping[str, Any]) -> Profile | None:
    """Return what jobs have that do not set it, from a part of a spec; None: nothing. Raises: InvalidManifest."""
    names = ("networkPolicy", "securityProfile")
    errors = [unknown_member(name, "", names) for name in given if name not in names]
    spec = parse_resource({"metadata": {}, "spec": {"template": {"spec": {}}, **given}}).spec
    errors += check_network_policy(spec.network_policy)
    if errors:
        raise InvalidManifest(errors)
    written = msgspec.json.decode(msgspec.json.encode(spec))  # lists as they come back from an API server
    job = {name: value for name, value in written.items() if name in names and value}
    return read_profile({"kind": JOB_DEFAULTS, "metadata": {"name": ""}, "spec": {"job": job}}) if job else None


async def find_profile(cluster: Cluster, snapshot: Snapshot, defaults: Profile | None) -> Profile | Refusal | None:
    """Return the profile of a job, or why it has to wait for it; None: it has none. Raises: ClusterError.

    ``defaults``: what a job that begins has where neither it nor its profile sets it.
    """
    reference, status = profile_reference(snapshot.resource), parse_status(snapshot.resource)
    taken = status.profile
    if reference is None:
        return taken if status.attempt or snapshot.jobs else defaults
    kind, name = reference
    # A Job without an attempt in status: that one was lost, and the Job was made with this copy.
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
        return read_profile({**raw, "kind": kind}, defaults)
    except InvalidManifest as error:
        return Refusal(c.INVALID_SPEC, f"{what}: {error}")


def refuse_changes(locked: Sequence[FieldError]) -> Refusal | None:
    """Return the refusal of a spec that sets fields which its profile has locked."""
    return Refusal(c.PROFILE_LOCKED, "\n".join(map(str, locked))) if locked else None
