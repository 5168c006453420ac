"""Outages of the API server and recreated objects: the operator's process against the stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ddp_operator.api.constants import EXIT_RETRYABLE, KIND
from ddp_operator.api.kubeobjects import format_time
from tests.drills.core import DrillOutcome, NotHere, Perished, check_blamed, drill
from tests.drills.scene import PATIENCE, Scene
from tests.support import ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.kubernetes_binaries import find_binary
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors, StandIn
from tests.support.standin.actors import killed

Json = dict[str, Any]
NAME = "digits"


class ServerStage:
    """A stand-in API server, the operator beside it, and users."""

    def __init__(self, server: StandIn, actors: ClusterActors, operator: OperatorProcess) -> None:
        self.server = server
        self.actors = actors
        self.operator = operator

    async def until(self, probe: Callable[[], Any], event: str) -> Any:
        """Poll the storage, also during an outage of the server, until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not (to_thread := await asyncio.to_thread(probe)):
            if time.monotonic() > deadline or self.operator.process is None or self.operator.process.poll() is not None:
                raise Perished(f"never: {event}; {self.status()}\n{self.operator.log[-4000:]}")
            await asyncio.sleep(0.02)
        return to_thread

    def status(self) -> Json:
        """Return the job's status."""
        result = self.server.get(KIND, NAME) or {}
        return dict(result.get("status") or {})

    def jobs(self) -> list[str]:
        """Return the names of all Jobs that were ever created, in order."""
        return [name for verb, name in self.server.writes_of("jobs") if verb == "create"]

    async def train(self, job: str) -> None:
        """Run both pods of a Job."""
        for index in (0, 1):
            await self.until(partial(self.pod, job, index), f"pod {index} of {job}")
            await self.actors.run_pod(job, index)
        await self.until(lambda: self.status().get("phase") == "Running", f"{job} running")

    async def succeed(self, job: str) -> Json:
        """Complete both pods of a Job."""
        for index in (0, 1):
            await self.actors.finish_pod(job, index)
        await self.until(lambda: self.status().get("phase") == "Succeeded", "success")
        return self.status()

    def pod(self, job: str, index: int) -> Json | None:
        """Return the living pod of an index."""
        label = {"batch.kubernetes.io/job-name": job, "batch.kubernetes.io/job-completion-index": str(index)}
        for pod in self.server.list("Pod"):
            labels = pod["metadata"].get("labels") or {}
            if label.items() <= labels.items() and "deletionTimestamp" not in pod["metadata"]:
                return dict(pod)
        return None


@contextlib.asynccontextmanager
async def stage(scene: Scene) -> AsyncIterator[ServerStage]:
    """Start all three."""
    with StandIn() as server:
        kubeconfig = server.write_kubeconfig(scene.folder)
        (port,) = free_ports(1)
        env = {"DDP_OPERATOR_CALL_TIMEOUT": "2"} | scene.marks
        with OperatorProcess(kubeconfig, scene.folder / "operator.log", port=port, env=env) as operator:
            async with ClusterActors(kubeconfig) as actors:
                yield ServerStage(server, actors, operator)


@drill("api-down", "no call to the API server gets through for 60 s; meanwhile a pod fails", trains=False)
def api_down(scene: Scene) -> DrillOutcome:
    return asyncio.run(_api_down(scene, 6.0 if scene.fast else 60.0))


async def _api_down(scene: Scene, seconds: float) -> DrillOutcome:
    async with stage(scene) as here:
        await here.actors.create(job_manifest(NAME))
        await here.train(f"{NAME}-1")
        pod = here.pod(f"{NAME}-1", 1)
        assert pod is not None
        since = time.monotonic()
        here.server.faults.add("drop", times=1_000_000_000)
        here.server.cut_watches()
        here.server.change("Pod", pod["metadata"]["name"], _fail)
        await here.until(lambda: time.monotonic() - since > seconds, "the end of the outage")
        if here.status()["attempt"] != 1:
            raise Perished("something got through: this was no outage")
        here.server.faults.clear()
        back = time.monotonic()
        await here.until(lambda: f"{NAME}-2" in here.jobs(), "the next attempt's Job")
        taken = time.monotonic() - back
        await here.train(f"{NAME}-2")
        status = await here.succeed(f"{NAME}-2")
        _check(here, status, ["digits-1", "digits-2"], attempt=2, counted=1)
        check_blamed(status, 1)
    return DrillOutcome(seconds=taken, note="recovery: from the server's return to the next attempt's Job")


@drill("api-frozen", "a real kube-apiserver stands still for 60 s, then goes on; a pod fails after that", trains=False)
def api_frozen(scene: Scene) -> DrillOutcome:
    if not all(find_binary(name) for name in ("etcd", "kube-apiserver", "kube-controller-manager")):
        raise NotHere("needs etcd, kube-apiserver and kube-controller-manager in KUBEBUILDER_ASSETS")
    return asyncio.run(_api_frozen(scene, 6.0 if scene.fast else 60.0))


async def _api_frozen(scene: Scene, seconds: float) -> DrillOutcome:
    with ControlPlane(scene.folder) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds" / "ddptrainingjobs.yaml"))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        (port,) = free_ports(1)
        with OperatorProcess(plane.admin, scene.folder / "operator.log", port=port, env=scene.marks) as operator:
            async with ClusterActors(plane.admin) as actors:
                await actors.create(job_manifest(NAME))
                for index in (0, 1):
                    await actors.run_pod(f"{NAME}-1", index)
                await actors.phase(NAME, "Running")
                plane.signal("kube-apiserver", signal.SIGSTOP)
                await asyncio.sleep(seconds)
                plane.signal("kube-apiserver", signal.SIGCONT)
                await actors.finish_pod(f"{NAME}-1", 1, exit_code=EXIT_RETRYABLE)
                failed = time.monotonic()
                while await actors.get("Job", f"{NAME}-2") is None:
                    if time.monotonic() - failed > PATIENCE:
                        raise Perished(f"no next attempt\n{operator.log[-4000:]}")
                    await actors.end_deleted_pods()  # this drill has no other kubelet
                    await asyncio.sleep(0.05)
                taken = time.monotonic() - failed
                for index in (0, 1):
                    await actors.run_pod(f"{NAME}-2", index)
                for index in (0, 1):
                    await actors.finish_pod(f"{NAME}-2", index)
                status = (await actors.phase(NAME, "Succeeded"))["status"]
                jobs = [job["metadata"]["name"] for job in await actors.list("Job")]
            if operator.process is None or operator.process.poll() is not None:
                raise Perished(f"the operator ended\n{operator.log[-4000:]}")
    if sorted(jobs) != [f"{NAME}-1", f"{NAME}-2"] or status["restarts"]["counted"] != 1:
        raise Perished(f"{jobs}, {status}")
    return DrillOutcome(seconds=taken, note="recovery: from the failure after it to the next attempt's Job")


@drill("api-recreated", "the resource is deleted and made anew at once under its name", fast=True, trains=False)
def recreate(scene: Scene) -> DrillOutcome:
    return asyncio.run(_recreate(scene))


async def _recreate(scene: Scene) -> DrillOutcome:
    async with stage(scene) as here:
        old = await here.actors.create(job_manifest(NAME))
        await here.train(f"{NAME}-1")
        await here.actors.delete(KIND, NAME)
        since = time.monotonic()
        await here.until(lambda: here.server.get(KIND, NAME) is None, "the deletion")
        new = await here.actors.create(job_manifest(NAME))
        assert new["metadata"]["uid"] != old["metadata"]["uid"]

        def made_anew() -> bool:
            job = here.server.get("Job", f"{NAME}-1")
            owners = job["metadata"]["ownerReferences"] if job else []
            return any(owner["uid"] == new["metadata"]["uid"] for owner in owners)

        await here.until(made_anew, "a Job of the new resource")
        taken = time.monotonic() - since
        await here.until(lambda: here.pod(f"{NAME}-1", 0) and here.pod(f"{NAME}-1", 1), "its pods")
        await here.train(f"{NAME}-1")
        status = await here.succeed(f"{NAME}-1")
        _check(here, status, ["digits-1", "digits-1"], attempt=1, counted=0)
        if "lastFailure" in status:
            raise Perished(f"the new job bears marks of the old one: {status['lastFailure']}")
    return DrillOutcome(seconds=taken, note="recovery: from the deletion to the new Job")


def _check(here: ServerStage, status: Mapping[str, Any], jobs: list[str], *, attempt: int, counted: int) -> None:
    """Check that each attempt was created once, and that one of each child and the launcher's objects remain."""
    if here.jobs() != jobs or status["attempt"] != attempt or status["restarts"]["counted"] != counted:
        raise Perished(f"made {here.jobs()}, not {jobs}; {status}")
    for kind, count in (("Service", 1), ("ConfigMap", 2)):
        if len(here.server.list(kind)) != count:
            raise Perished(f"left: {[child['metadata']['name'] for child in here.server.list(kind)]}")


def _fail(pod: Json) -> None:
    """End a pod as after a failed worker."""
    ended = killed(pod, format_time(datetime.now(UTC)))
    for container in ended.get("containerStatuses", ()):
        container["state"]["terminated"]["exitCode"] = EXIT_RETRYABLE
    pod["status"].update(ended)
