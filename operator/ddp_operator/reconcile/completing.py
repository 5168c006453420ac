"""Jobs whose spec names an object with further values: a feature finds these, and the status keeps them from the start.

The kernel handles complete specs only. This is above it: a pass begins once the values are in the status.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.cluster import Cluster, Object, Snapshot
from ddp_operator.api.completion import complete_job, names_values
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.parse import parse_status
from ddp_operator.api.status import Profile
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Guard, Hooks, Service, name_fault
from ddp_operator.decide.state import AT_ONCE, Refusal
from ddp_operator.reconcile.reconciler import CurrentPass, Follow, PassEnd, Reconciler
from ddp_operator.reconcile.turns import Turns

SECONDS_TO_COMPLETE: Final = 60.0
"""Limit of a hook that reads what completes a job's spec."""


class CompletingService(Service):
    """A service that has values which complete the specs of jobs (``api/schema.Completion``)."""

    completes: bool = True
    """Whether it has any."""

    async def find_values(self, snapshot: Snapshot) -> Profile | Refusal | None:
        """Return the values that complete a job that has not started, before its spec is parsed. None: it is complete.

        The status keeps a copy. A fault makes the job wait. Raises: ClusterError, which is no fault.
        """
        return None


class CompletingReconciler(Reconciler):
    """A reconciler whose features complete specs."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        turns: Turns,
        hooks: Hooks,
        clock: Callable[[], datetime] = utc_now,
        progress_interval: float = 10.0,
        followers: Sequence[Follow] = (),
    ) -> None:
        super().__init__(
            cluster, turns=turns, clock=clock, progress_interval=progress_interval, hooks=hooks, followers=followers
        )
        self._features = hooks

    async def _prepare(self, current: CurrentPass) -> DDPTrainingJob | PassEnd:
        """Return the typed job, completed by its profile. Raises: as ``_run_pass``."""
        profile = await self._settle_profile(current)
        if isinstance(profile, PassEnd):
            return profile
        job = await self._parse_job(current, profile)
        if profile is None and isinstance(job, DDPTrainingJob) and job.is_completed:
            missing = "no feature of this operator reads what completes the spec"
            return await self._refuse(current, Refusal(c.FEATURE_FAULT, missing))
        return job

    def _parse(self, resource: Object, profile: Profile | None) -> DDPTrainingJob:
        """Return the typed job. Raises: InvalidManifest."""
        return complete_job(resource, profile, self._features.schema)

    async def _settle_profile(self, current: CurrentPass) -> Profile | PassEnd | None:
        """Return the job's profile once the status has a copy of it. Raises: VersionConflict, ClusterError."""
        profile = await self._find_values(current)
        if isinstance(profile, Refusal):
            return await self._refuse(current, profile)
        if profile is None and "profile" not in (current.resource.get("status") or {}):
            return None
        status = parse_status(current.resource)
        if status.profile == profile:
            return profile
        await self._write(current, status, replace(status, profile=profile))
        return PassEnd(AT_ONCE)

    async def _find_values(self, current: CurrentPass) -> Profile | Refusal | None:
        """Return what completes a job's spec; a refusal while the hook has a fault. None: the spec is complete.

        A started job keeps the copy in its status, so a fault concerns the others. Raises: ClusterError.
        """
        status = parse_status(current.resource)
        is_settled = status.profile is not None or not names_values(self._features.schema, current.resource.get("spec"))
        for name, service in self._features.services.items():
            if not isinstance(service, CompletingService) or not service.completes:
                continue
            if status.attempt and is_settled:
                break
            call = partial(service.find_values, current.snapshot)
            refused: Profile | Refusal | None = name_fault(name)
            kind = Profile | Refusal | None
            guard = Guard(str(current.key), current.memory.faults)
            return await guard.wait(
                name, "find_values", call, kind, limit=SECONDS_TO_COMPLETE, default=refused, is_valid=_are_values
            )
        return status.profile


def _are_values(value: Profile | Refusal | None) -> bool:
    return not isinstance(value, Profile) or isinstance(value.job, Mapping)
