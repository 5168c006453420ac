"""The controller-manager and the kubelets: pods of Jobs, garbage collection, and the end of deleted pods.

They only read and write the storage, as every client does, in one task, some milliseconds after each change.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from datetime import datetime

from ddp_cli.local.job_controller import JobDecision, decide_job
from ddp_operator.api.constants import JOB_TRACKING_FINALIZER
from ddp_operator.manifests.children import build_pod

from .actors import FINISHED, killed
from .errors import ApiFailure
from .kueue import Kueue
from .resources import Kind
from .storage import Mailbox, Object, Storage, copied

DELAY = 0.005
JobController = Callable[[Object, list[Object], datetime], JobDecision]


class Controllers:
    """Runs all controllers after every change, until nothing changes."""

    def __init__(self, storage: Storage, kind: Callable[[str], Kind]) -> None:
        self._storage = storage
        self._kind = kind
        self.job_controller: JobController | None = decide_job
        """None: Jobs stay unchanged."""
        self.collects_garbage = True
        self.ends_pods = True
        """Whether deleted pods on a node are removed, as by a live kubelet."""
        self.dead_nodes: set[str] = set()
        """Nodes on which no kubelet ends a pod any more."""
        self.suffix: Callable[[], str] = lambda: secrets.token_hex(3)[:5]
        """Draws the random suffix of a pod's name."""
        self.kueue: Kueue | None = None
        """Set if Kueue is installed."""
        self.failure: BaseException | None = None

    async def run(self) -> None:
        """Run without end."""
        mailbox = Mailbox(self._storage)
        try:
            while True:
                await mailbox.queue.get()
                await asyncio.sleep(DELAY)
                while not mailbox.queue.empty():
                    mailbox.queue.get_nowait()
                self.round()
        except Exception as exc:  # raised in the test when the server stops
            self.failure = exc
            raise
        finally:
            mailbox.close()

    def round(self) -> None:
        """Process all present changes once."""
        if self.ends_pods:
            self._end_pods()
        if self.collects_garbage:
            self._collect_garbage()
        if self.kueue is not None:
            self.kueue.round()
        if self.job_controller is not None:
            jobs = {job["metadata"]["uid"]: job for _, job in self._storage.peek(self._kind("Job"))}
            pods: dict[str, list[Object]] = {}
            for _, pod in self._storage.peek(self._kind("Pod")):
                for owner in pod["metadata"].get("ownerReferences") or []:
                    if owner["kind"] == "Job" and owner["uid"] not in jobs:
                        self._release(pod)  # its Job is deleted, so it may be deleted too
                    pods.setdefault(owner["uid"], []).append(pod)
            for uid, job in jobs.items():
                self._control(self.job_controller, job, pods.get(uid, []))

    def _control(self, controller: JobController, job: Object, own: list[Object]) -> None:
        namespace = job["metadata"]["namespace"]
        pods = self._kind("Pod")
        decision = controller(job, own, self._storage.clock())
        if decision.retry_after is not None:
            asyncio.get_running_loop().call_later(decision.retry_after, self.round)
        if not decision.changes(job):
            return
        if decision.status != job.get("status", {}):
            changed = copied(job) | {"status": dict(decision.status)}
            self._storage.update(self._kind("Job"), copied(job), changed, verb="job controller")
        for name in decision.release:
            self._release(self._storage.find(pods, namespace, name))
        for name in decision.delete:
            self._delete(pods, self._storage.find(pods, namespace, name))
        for index in decision.create:
            try:
                self._storage.create(pods, build_pod(job, index, suffix=self.suffix()))
            except ApiFailure as failure:
                if failure.code != 409:
                    raise

    def _release(self, pod: Object | None) -> None:
        if pod is not None and JOB_TRACKING_FINALIZER in (pod["metadata"].get("finalizers") or []):
            released = copied(pod)
            released["metadata"]["finalizers"].remove(JOB_TRACKING_FINALIZER)
            self._storage.update(self._kind("Pod"), copied(pod), released, verb="job controller")

    def _collect_garbage(self) -> None:
        """Delete the dependents of a deleted owner, which is identified by its UID."""
        alive = {obj["metadata"]["uid"] for _, obj in self._storage.peek()}
        for kind, obj in self._storage.peek():
            owners = obj["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in alive for owner in owners):
                meta = obj["metadata"]
                self._delete(kind, self._storage.find(kind, meta.get("namespace", ""), meta["name"]))

    def _end_pods(self) -> None:
        """Fail deleted pods and end their grace period, as kubelets and the pod collector do."""
        for _, pod in self._storage.peek(self._kind("Pod")):
            meta = pod["metadata"]
            lives = pod["status"].get("phase") not in FINISHED
            if pod["spec"].get("nodeName") in self.dead_nodes:
                continue
            if meta.get("deletionTimestamp") and (lives or meta.get("deletionGracePeriodSeconds")):
                ended = copied(pod)
                ended["metadata"]["deletionGracePeriodSeconds"] = 0
                if lives:
                    ended["status"] |= killed(pod, self._storage.timestamp())
                self._storage.update(self._kind("Pod"), copied(pod), ended, verb="kubelet")

    def _delete(self, kind: Kind, obj: Object | None) -> None:
        if obj is None:
            return
        finished = (obj.get("status") or {}).get("phase") in FINISHED
        on_node = kind.kind == "Pod" and bool(obj["spec"].get("nodeName")) and not finished
        if "deletionTimestamp" not in obj["metadata"]:
            grace = obj["spec"].get("terminationGracePeriodSeconds", 30) if on_node else None
            self._storage.delete(kind, obj, grace=grace)
