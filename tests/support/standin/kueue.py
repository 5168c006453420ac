"""Kueue (0.13) and its effect on Jobs: suspend them at creation, admit, preempt, and stop Jobs that run unadmitted.

``round`` is its controller, ``default`` its webhook for new Jobs. Quota is counted in pods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ddp_cli.local.job_controller import has_condition

from .resources import Kind
from .storage import Object, Storage, copied

QUEUE = "kueue.x-k8s.io/queue-name"
PODSET = "kueue.x-k8s.io/podset"
WORKLOAD = Kind("kueue.x-k8s.io", "v1beta1", "Workload", "workloads")
LOCAL_QUEUE = Kind("kueue.x-k8s.io", "v1beta1", "LocalQueue", "localqueues")

Manages = Literal["labelled", "default queue", "all"]
"""Managed Jobs: those with the label; all, because a LocalQueue called default labels them; or all without a label."""


class Kueue:
    """One queue of a namespace."""

    def __init__(
        self, storage: Storage, kind: Callable[[str], Kind], manages: Manages = "labelled", *, quota: int = 10**6
    ) -> None:
        self._storage = storage
        self._kind = kind
        self.manages = manages
        self.quota = quota
        """Pods that may run at the same time."""
        self.admitted: dict[str, int] = {}
        """Number of pods of the Jobs with quota, by UID. A Job that changes its size while it runs is stopped."""

    def default(self, job: Object) -> None:
        """Change a Job at its creation: label it if there is a default queue, suspend it if it is managed."""
        if self.manages == "default queue":
            job["metadata"].setdefault("labels", {}).setdefault(QUEUE, "default")
        if self._is_managed(job):
            job["spec"]["suspend"] = True

    def round(self) -> None:
        """Process all present changes once."""
        jobs = [job for job in self._storage.list(self._kind("Job")) if self._is_managed(job)]
        running = [job for job in jobs if not (has_condition(job, "Complete") or has_condition(job, "Failed"))]
        uids = {job["metadata"]["uid"] for job in running}
        self.admitted = {uid: pods for uid, pods in self.admitted.items() if uid in uids}
        for job in sorted(running, key=lambda job: (job["metadata"]["creationTimestamp"], job["metadata"]["name"])):
            uid = job["metadata"]["uid"]
            suspended = job["spec"].get("suspend")
            if not suspended and self.admitted.get(uid) != job["spec"]["parallelism"]:
                self.admitted.pop(uid, None)
                self._stop(job)
            elif suspended and (uid in self.admitted or self._has_room(job, running)):
                self.admitted[uid] = job["spec"]["parallelism"]
                self._start(job)

    def preempt(self) -> None:
        """Withdraw the quota of every Job. It waits for quota again once its pods have ended."""
        self.admitted.clear()
        self.round()

    def bypassed(self) -> list[str]:
        """Return the Jobs that run without Kueue's admission."""
        results = []
        for change, write in zip(self._storage.history, self._storage.writes, strict=True):
            before = change.before
            after = change.after
            if change.kind.kind != "Job" or not before or not after or write[0] == "kueue":
                continue
            if self._is_managed(before) and before["spec"].get("suspend") and not after["spec"].get("suspend"):
                results.append(str(after["metadata"]["name"]))
        return results

    def _is_managed(self, job: Object) -> bool:
        return self.manages == "all" or QUEUE in (job["metadata"].get("labels") or {})

    def _has_room(self, job: Object, jobs: Sequence[Object]) -> bool:
        if (job.get("status") or {}).get("active") or "deletionTimestamp" in job["metadata"]:
            return False
        used = sum(item["spec"]["parallelism"] for item in jobs if item["metadata"]["uid"] in self.admitted)
        return bool(used + job["spec"]["parallelism"] <= self.quota)

    def _start(self, job: Object) -> None:
        changed = copied(job)
        changed["spec"]["suspend"] = False
        _template_labels(changed)[PODSET] = "main"
        self._storage.update(self._kind("Job"), job, changed, verb="kueue")

    def _stop(self, job: Object) -> None:
        changed = copied(job)
        changed["spec"]["suspend"] = True
        _template_labels(changed).pop(PODSET, None)
        (changed.get("status") or {}).pop("startTime", None)
        self._storage.update(self._kind("Job"), job, changed, verb="kueue")


def _template_labels(job: Object) -> dict[str, Any]:
    labels: dict[str, Any] = job["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {})
    return labels
