"""The whole resource as the rest of the operator sees it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ddp_operator import constants
from ddp_operator.api.rules import ONCE_RUN
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status

# The fixed limits that can end a job, or an attempt of it; the others are fields of the spec. docs/api.md has all.
CRASH_LOOP_FAILURES: Final = 3
SILENT_POD_SECONDS: Final = 60
"""A pod that runs may be on a lost node. Kubernetes finds that out after 50 seconds (40 before 1.32), and a kubelet
that lives has reported by then too; the next attempt could not begin before the end of that pod anyway."""
SILENT_START_SECONDS: Final = 15
"""Secondary failures are often reported first: the pod that caused them still writes its traceback."""


@dataclass(frozen=True, slots=True)
class JobSize:
    """The number of pods of an attempt: ``nodes`` train, ``spares`` are on standby."""

    nodes: int
    spares: int = 0

    @property
    def pods(self) -> int:
        """All pods, the completions of the attempt's Job."""
        return self.nodes + self.spares


@dataclass(frozen=True, slots=True)
class DDPTrainingJob:
    """A parsed ``DDPTrainingJob``: identity, typed spec, typed status."""

    name: str
    namespace: str
    spec: Spec
    status: Status = field(default_factory=Status)
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False
    created: str = ""
    locked: tuple[str, ...] = ()
    """Paths of the spec that the job's profile locks."""

    @property
    def in_place_restarts(self) -> int:
        """How often the launchers of an attempt that begins now may restart the workers in the same pods."""
        asked, restarts = self.spec.recovery.in_place_restarts, self.status.restarts
        if asked is not None:
            return asked
        # The failure that would be one too many in a row has to be the operator's to judge.
        last_try = restarts.without_progress >= CRASH_LOOP_FAILURES - 1
        if self.spec.rendezvous.backend == "static" or last_try:
            return 0
        return max(0, self.spec.recovery.max_restarts - restarts.used)

    @property
    def spares(self) -> int:
        """How many pods there are beside the nodes."""
        return self.spec.spares or 0

    @property
    def size(self) -> JobSize:
        """The size that the spec requests."""
        return self.size_with(self.spec.nodes)

    @property
    def attempt_size(self) -> JobSize:
        """The size of the current attempt; a changed spec.nodes takes effect later."""
        return self.size_with(self.status.attempt_nodes)

    def size_with(self, nodes: int) -> JobSize:
        """Return the size of this job with a number of nodes."""
        return JobSize(nodes, self.spares)

    @property
    def claimed_gpus(self) -> int:
        """How many GPUs each pod has by resource claims."""
        return self.status.claims.gpus if self.status.claims is not None else 0

    @property
    def tracking_run(self) -> str:
        """The identity of the job's run in trackers; empty where it is not tracked.

        The name tells people which one it is, the UID tells it from another resource of the same name.
        """
        tracking = self.spec.tracking
        return "" if tracking is None else tracking.run_id or f"{self.name}-{self.uid[:8]}"

    @property
    def counts_in_place(self) -> bool:
        """Whether a restart in the same pods counts towards recovery.maxRestarts: it has no budget of its own."""
        return self.spec.recovery.in_place_restarts is None

    @property
    def spec_digest(self) -> str:
        """A digest of the fields of the spec by which a Job is replaced where they change before a pod has run."""
        fields = msgspec.to_builtins(self.spec)
        kept = {name: fields[name] for name in (*ONCE_RUN, "inputs") if name in fields}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def owner_reference(job: DDPTrainingJob, *, controller: bool = True) -> dict[str, Any]:
    """Return the owner reference that every child carries, so that deletion works with the operator down."""
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": controller,
        "blockOwnerDeletion": False,
    }


def kueue_metadata(job: DDPTrainingJob) -> dict[str, dict[str, str]]:
    """Return the labels and annotations of the resource that are for Kueue, which looks for them at the Job."""
    domain = constants.KUEUE_DOMAIN
    labels, annotations = (
        {key: value for key, value in given.items() if f".{key}".partition("/")[0].endswith(f".{domain}")}
        for given in (job.labels, job.annotations)
    )
    if constants.KUEUE_MIN_PARALLELISM in annotations:
        # With fewer pods at a time than completions, the last indices would run after the others have ended.
        annotations[constants.KUEUE_SYNC_COMPLETIONS] = "true"
    return {"labels": labels, "annotations": annotations}
