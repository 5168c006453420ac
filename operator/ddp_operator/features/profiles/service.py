"""Find the values that complete a job before any of its children is created.

The kernel stores them in the status before it creates any child, and keeps them. Later edits of a profile or of the
operator's defaults do not change a started job. What is missing or invalid becomes a refusal, which the condition
Accepted reports.
"""

from collections.abc import Awaitable, Callable

from ddp_operator.api.cluster import Object, Snapshot
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.other_kinds import PROFILE_KIND
from ddp_operator.api.parse import parse_status
from ddp_operator.api.status import Profile
from ddp_operator.decide import conditions as c
from ddp_operator.decide.foreign_objects import refuse_read
from ddp_operator.decide.refusals import refuse_invalid
from ddp_operator.decide.state import Refusal
from ddp_operator.features.profiles.values import profile_reference, read_profile
from ddp_operator.kube.client import ApiClient, ObjectNotFound, call
from ddp_operator.reconcile.completing import CompletingService

Read = Callable[[str, str, str], Awaitable[Object | None]]
"""Returns the current profile by kind, namespace of the job and name, without a cache. None: it does not exist.

Raises: Refused if the operator may not read it, ClusterError.
"""


class Profiles(CompletingService):
    """Reads the profile of each job once, at its start. ``defaults``: for fields that neither the job nor it sets."""

    completes = True

    def __init__(self, read: Read, defaults: Profile | None = None) -> None:
        self._read = read
        self._defaults = defaults

    async def find_values(self, snapshot: Snapshot) -> Profile | Refusal | None:
        """Return the values for a job, or the refusal if its profile cannot be read. Raises: ClusterError."""
        reference = profile_reference(snapshot.resource)
        # If a Job exists without an attempt in the status, a write was lost; the Job was built from this copy.
        copy = parse_status(snapshot.resource).profile
        if reference is None:
            return copy if snapshot.jobs else self._defaults
        kind, name = reference
        if copy is not None and snapshot.jobs and (copy.kind, copy.name) == reference:
            return copy
        return await self._read_profile(kind, snapshot.resource["metadata"]["namespace"], name)

    async def _read_profile(self, kind: str, namespace: str, name: str) -> Profile | Refusal:
        """Return the current values of a profile. ``namespace``: of the job. Raises: ClusterError."""
        subject = f"spec.profileRef: {kind} {name}"
        try:
            raw = await self._read(kind, namespace, name)
        except Refused as error:
            remedy = "grant the operator get on it (docs/profiles.md)"
            if kind != PROFILE_KIND:
                remedy += f", or name a {PROFILE_KIND} of namespace {namespace}"
            return refuse_read(subject, error, remedy)
        if raw is None:
            where = f" in namespace {namespace}" if kind == PROFILE_KIND else ""
            return Refusal(c.PROFILE_NOT_FOUND, f"{subject} does not exist{where}; create it or correct the name")
        try:
            return read_profile({**raw, "kind": kind}, self._defaults)
        except InvalidManifest as error:
            return refuse_invalid(error, subject)


def read_by(client: ApiClient) -> Read:
    """Return what reads profiles from the API server."""

    async def read(kind: str, namespace: str, name: str) -> Object | None:
        scope = namespace if kind == PROFILE_KIND else None
        try:
            raw: Object = await call(client, "GET", kind, scope, name, refusable=True)
        except ObjectNotFound:
            return None
        return raw

    return read
