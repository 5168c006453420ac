"""The parsed resource: metadata, typed spec and typed status."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.parts import NO_PARTS, SpecSchema
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status

# Fixed limits that can end a job or an attempt. Further limits are fields of the spec; docs/api.md lists all.
CRASH_LOOP_FAILURES: Final = 3
SILENT_POD_SECONDS: Final = 60
"""Wait for the report of a running pod after a failure. The pod may be on a lost node, which Kubernetes detects after
50 seconds (40 before 1.32)."""
SILENT_START_SECONDS: Final = 15
"""Wait for the root cause. Secondary failures are often reported first, while the cause still writes its traceback."""


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
    """A parsed ``DDPTrainingJob``."""

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
    held: str = ""
    """Why Kueue does not let the pods of a job from a manager cluster run; ``spec.suspend`` is then true."""
    schema: SpecSchema = field(default=NO_PARTS, compare=False)
    """That of the spec."""
    is_completed: bool = False
    """Whether the spec names an object with further values, which it has."""
    former: Mapping[str, Any] = field(default_factory=dict)
    """What the digest has in the form of the release before; None: only this one has the member."""
    nonce: str = ""
    """The end of the name of the next Job's rendezvous Secret."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def restarts_left(self) -> int:
        """The number of counted restarts until the job fails."""
        return max(0, self.spec.recovery.max_restarts - self.status.counts.used)

    @property
    def in_place_restarts(self) -> int:
        """The number of restarts in the same pods that the launchers may do in an attempt that starts now."""
        recovery = self.spec.recovery
        restarts = self.status.counts
        if recovery.in_place_restarts is not None:
            return recovery.in_place_restarts

        # The next failure without progress may end the job, which only the operator decides.
        next_failure_may_end_job = restarts.without_progress >= CRASH_LOOP_FAILURES - 1
        if self.spec.rendezvous.backend == "static" or next_failure_may_end_job:
            return 0
        return self.restarts_left

    @property
    def holds_pods(self) -> bool:
        """Whether the pods stay when their ranks end, for another run of changed code."""
        return self.schema.holding is not None and self.schema.holding.is_set(self.spec)

    @property
    def spares(self) -> int:
        """The number of spare pods in addition to the nodes."""
        return self.spec.spares or 0

    @property
    def size(self) -> JobSize:
        """The size that the spec requests."""
        return self.size_with(self.spec.nodes)

    def size_with(self, nodes: int) -> JobSize:
        """Return the size of this job with a number of nodes."""
        return JobSize(nodes, self.spares)

    def size_of(self, pods: int) -> JobSize:
        """Return the size of an attempt whose Job has a number of pods."""
        return JobSize(max(1, pods - self.spares), self.spares)

    @property
    def counts_in_place(self) -> bool:
        """Whether restarts in the same pods count towards recovery.maxRestarts, as they have no separate limit."""
        return self.spec.recovery.in_place_restarts is None

    @property
    def spec_digest(self) -> str:
        """A digest of the fields whose change replaces the Job before a pod has run."""
        fields = msgspec.to_builtins(self.spec)
        kept = {name: fields[name] for name in self.schema.replacing if name in fields}
        # As the release before wrote it: another digest would replace the Jobs of waiting jobs, which lose their place.
        kept = {name: value for name, value in {**kept, **self.former}.items() if value is not None}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def owner_reference(job: DDPTrainingJob, *, controller: bool = True) -> dict[str, Any]:
    """Return the owner reference of every child: Kubernetes then deletes children while the operator is down too."""
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": controller,
        "blockOwnerDeletion": False,
    }


def kueue_metadata(job: DDPTrainingJob) -> dict[str, dict[str, str]]:
    """Return the resource's labels and annotations for Kueue. Kueue reads them from the Job."""
    labels = select_kueue_keys(job.labels)
    annotations = select_kueue_keys(job.annotations)
    if constants.KUEUE_MIN_PARALLELISM in annotations:
        # With fewer pods at a time than completions, the last indices would run only after the first ones have ended.
        annotations[constants.KUEUE_SYNC_COMPLETIONS] = "true"
    return {"labels": labels, "annotations": annotations}


def find_prebuilt_workload(job: DDPTrainingJob) -> str:
    """Return the name of the Workload with which Kueue copied the job from a manager cluster; empty: it is no copy."""
    if constants.KUEUE_ORIGIN_LABEL not in job.labels:
        return ""
    key = constants.KUEUE_PREBUILT_WORKLOAD
    return job.annotations.get(key) or job.labels.get(key, "")


def inherited_labels(job: DDPTrainingJob) -> dict[str, str]:
    """Return the resource's labels that its children get too, because policies demand labels of all objects."""
    return {
        key: value
        for key, value in job.labels.items()
        if key in constants.INHERITED_LABELS
        or "/" not in key
        or not f".{key.partition('/')[0]}".endswith(constants.PRIVATE_LABEL_DOMAINS)
    }


def select_kueue_keys(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the pairs whose key has Kueue's domain, or a subdomain of it."""
    suffix = f".{constants.KUEUE_DOMAIN}"
    return {key: value for key, value in pairs.items() if f".{key}".partition("/")[0].endswith(suffix)}
