"""The launcher's ConfigMap, which all jobs of a namespace share and which Kubernetes deletes with the last of them.

Each job is an owner of one small ConfigMap, LAUNCHER_USERS, and that owns the launchers: another job costs a patch of
the small one, and ConfigMaps of that single name are all that the operator must be allowed to patch.
"""

import asyncio
from collections import defaultdict

from ddp_operator.api.job import DDPTrainingJob, owner_reference
from ddp_operator.cluster import AlreadyExists, Cluster, Object, owner_uids
from ddp_operator.manifests.children import build_launcher_config_map, build_launcher_users, load_launcher
from ddp_operator.status.decision import Refusal
from ddp_operator.status.ownership import explain_launcher_conflict

WAIT_FOR_COLLECTOR = 1.0
"""Seconds. What a deleted owner has left is being deleted: nothing tells when it is gone."""


class Launchers:
    """Knows what this process has seen of them. A restart may forget it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._users: dict[str, Object] = {}
        """By namespace."""
        self._known: set[tuple[str, str, str]] = set()
        """Namespace, name and owner's UID of each launcher whose content is ours."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._joining: defaultdict[str, dict[str, Object]] = defaultdict(dict)
        """By namespace and UID the jobs that are no users yet, as owner references."""

    async def ensure(self, job: DDPTrainingJob, *, seen: bool) -> Refusal | float | None:
        """Make the job a user of its namespace's launchers, and have this version's among them.

        ``seen``: it was there lately. Returns a refusal, or seconds to wait for the garbage collector, or None.
        Raises: Refused, ClusterError.
        """
        # Jobs that come meanwhile go together in the next patch: each writes the references of all jobs anew, and of
        # two at the same time the API server does one again.
        joining = self._joining[job.namespace]
        joining[job.uid] = owner_reference(job, controller=False)
        async with self._locks[job.namespace]:
            if job.uid not in joining:
                return None  # gone with another's
            together = tuple(joining.items())
            outcome = await self._ensure(job, [reference for _, reference in together], seen=seen)
            if outcome is None:
                for uid, _ in together:
                    joining.pop(uid, None)
            return outcome

    async def _ensure(self, job: DDPTrainingJob, references: list[Object], *, seen: bool) -> Refusal | float | None:
        users = await self._join(job, references)
        if users is None or isinstance(users, Refusal):
            return users or WAIT_FOR_COLLECTOR
        owner = users["metadata"]["uid"]
        manifest = build_launcher_config_map(job, load_launcher(), owner)
        known = job.namespace, manifest["metadata"]["name"], owner
        if seen and known in self._known:
            return None
        try:
            await self._cluster.create(manifest)
        except AlreadyExists as error:
            if refusal := explain_launcher_conflict(manifest, error.existing):
                return refusal
            if owner not in owner_uids(error.existing) or "deletionTimestamp" in error.existing["metadata"]:
                return WAIT_FOR_COLLECTOR
        self._known.add(known)
        return None

    async def _join(self, job: DDPTrainingJob, references: list[Object]) -> Object | Refusal | None:
        """Make jobs owners of LAUNCHER_USERS, and return that. None: it is being deleted."""
        manifest = build_launcher_users(job)
        manifest["metadata"]["ownerReferences"] = references
        former = self._users.get(job.namespace)
        found = await self._cluster.add_owners(former, references) if former is not None else None
        if found is None:
            try:
                found = await self._cluster.create(manifest)
            except AlreadyExists as error:
                if refusal := explain_launcher_conflict(manifest, error.existing):
                    return refusal
                found = await self._cluster.add_owners(error.existing, references)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return None
        # Without the list of its owners, which grows with the jobs.
        identity = {name: found["metadata"][name] for name in ("namespace", "name", "uid")}
        self._users[job.namespace] = {"kind": "ConfigMap", "metadata": identity}
        return found
