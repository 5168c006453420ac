"""The operator, with its own account and role, at a real API server."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from ddp_operator.api.cluster import owner_uids
from ddp_operator.api.constants import CRD_NAME, KIND, LABEL_JOB_NAME
from ddp_operator.api.record import decode_record
from ddp_operator.api.stored_fields import read_status
from tests.support import ROOT
from tests.support.builders import job_manifest, last_words, page, template, trainer
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.counts import read_counts
from tests.support.full_status import OF_0_2_0
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]

SAMPLES = ROOT / "deploy" / "samples"
StartProcess = Callable[[], OperatorProcess]


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A separate namespace for the test."""
    name = f"t-{abs(hash(request.node.nodeid)) % 10**8}"
    plane.kubectl("create", "namespace", name)
    yield name
    plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest_asyncio.fixture
async def actors(plane: ControlPlane, namespace: str) -> AsyncIterator[ClusterActors]:
    """Users, and kubelets that release deleted pods."""
    async with ClusterActors(plane.admin, namespace) as cluster_actors, cluster_actors.kubelet():
        yield cluster_actors


@pytest.fixture
def start(plane: ControlPlane, tmp_path: Path) -> Iterator[StartProcess]:
    """Start the operator as its own service account."""
    kubeconfig = plane.account("ddp-operator", "ddp-operator")
    (port,) = free_ports(1)
    with ExitStack() as stack:
        yield lambda: stack.enter_context(OperatorProcess(kubeconfig, tmp_path / "operator.log", port=port))


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize(("sample", "name"), [("digits", "digits"), ("job", "cifar10")])
async def test_sample_gets_its_children_and_runs_to_its_end(
    plane: ControlPlane, namespace: str, actors: ClusterActors, start: StartProcess, sample: str, name: str
) -> None:
    start()
    plane.kubectl("apply", "-n", namespace, "-f", str(SAMPLES / f"{sample}.yaml"))
    for index in (0, 1):
        await actors.run_pod(f"{name}-1", index)
    resource = await actors.phase(name, "Running")
    children = {}
    for kind in ("Service", "Secret", "Job"):
        (child,) = await actors.list(kind, f"{LABEL_JOB_NAME}={name}")
        children[kind] = child
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == (KIND, resource["metadata"]["uid"], True)
    job = await actors.child_job(f"{name}-1")
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (2, 2, "Indexed")
    env = env_of(await actors.pod(f"{name}-1", 1))
    assert env["DDP_JOB_NAME"] == name
    assert env["DDP_RENDEZVOUS_SECRET"] == "", "the role view can read the pod"
    assert len(base64.b64decode(children["Secret"]["data"]["secret"])) == 64
    assert env["MASTER_ADDR"] == f"{name}-1-0.{name}"
    for index in (0, 1):
        await actors.finish_pod(f"{name}-1", index)
    done = await actors.phase(name, "Succeeded")
    assert set(done["metadata"]) & {"finalizers"} == set()
    described = plane.kubectl("describe", "ddp", name, "-n", namespace).stdout
    assert "Succeeded" in described.split("Events:")[1]


async def test_pods_without_ranks_run_in_namespace_with_limit_range(
    plane: ControlPlane, namespace: str, actors: ClusterActors, start: StartProcess
) -> None:
    limits = {"type": "Container", "min": {"memory": "1Gi"}, "maxLimitRequestRatio": {"memory": "1"}}
    limit_range = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "floor"},
        "spec": {"limits": [limits]},
    }
    plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(limit_range))
    start()
    pod = template(trainer(resources={"limits": {"cpu": "1", "memory": "2Gi"}}))
    claim = {"path": "/ckpt", "claimName": "ckpt"}
    entry = {"url": "https://example.com/data.bin", "mountPath": "/data", "claimName": "data"}
    await actors.create(job_manifest(nodes=1, history={}, checkpoint=claim, inputs=[entry], template=pod))
    for job in ("digits-inputs", "digits-1", "digits-history"):
        await actors.run_pod(job, 0)
        (container,) = (await actors.pod(job, 0))["spec"]["containers"]
        assert container["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}
        await actors.finish_pod(job, 0)


async def test_record_of_ended_job_precedes_its_time_to_live(actors: ClusterActors, start: StartProcess) -> None:
    """There is no kubelet, so the lines are missing; the role allows to read them."""
    operator = start()
    claim = {"path": "/ckpt", "claimName": "ckpt"}
    await actors.create(job_manifest(nodes=1, history={}, checkpoint=claim, ttlSecondsAfterFinished=0))
    await actors.run_pod("digits-1", 0)
    await actors.finish_pod("digits-1", 0)
    job = await actors.child_job("digits-history")
    record = decode_record(base64.b64decode(job["spec"]["template"]["spec"]["containers"][0]["command"][3]))
    assert record.resource["status"]["phase"] == "Succeeded"
    assert record.note.startswith("digits-1-0-")
    assert "forbidden" not in record.note
    await actors.run_pod("digits-history", 0)
    await actors.finish_pod("digits-history", 0)
    await actors.gone(KIND, "digits")
    await actors.gone("Job", "digits-history")
    assert operator.log.count('"event":"JobEnded"') == 1


NESTED = {"lists": "[" * 9_000 + "]" * 9_000, "objects": '{"a":' * 9_000 + "1" + "}" * 9_000}


@pytest.mark.parametrize("attack", [*NESTED, "size"])
async def test_hostile_spec_is_refused_and_next_job_runs(
    plane: ControlPlane, namespace: str, actors: ClusterActors, start: StartProcess, tmp_path: Path, attack: str
) -> None:
    """The API server stores 10,000 levels, and 1.5 MB."""
    member = f'"x": {NESTED[attack]}' if attack in NESTED else f'"x": {json.dumps("(" * 1_300_000)}'
    hostile = json.dumps(job_manifest("hostile")).replace('"containers"', f'{member}, "containers"', 1)
    path = tmp_path / "hostile.json"
    path.write_text(hostile)
    plane.kubectl("create", "-n", namespace, "--validate=false", "-f", str(path))
    start()
    refused = await actors.phase("hostile", "Rejected")
    [accepted] = [item for item in refused["status"]["conditions"] if item["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert accepted["message"].startswith("spec")
    await actors.create(job_manifest())
    plane.kubectl("annotate", "ddp", "hostile", "-n", namespace, "a=b")
    for index in (0, 1):
        await actors.run_pod("digits-1", index)
    await actors.phase("digits", "Running")


async def note_ends(actors: ClusterActors, ends: dict[str, tuple[str, str]]) -> None:
    """Record the phase and reason of each pod that no longer runs."""
    async for pod in actors.watch("Pod"):
        status = pod["status"]
        if status.get("phase") not in ("Pending", "Running"):
            ends[pod["metadata"]["name"]] = status["phase"], status.get("reason", "")


async def test_pods_of_dead_node_are_declared_failed_and_released(
    plane: ControlPlane, namespace: str, start: StartProcess
) -> None:
    """Only the operator ends these pods: their finalizer keeps a deleted pod."""
    start()
    async with ClusterActors(plane.admin, namespace) as users:
        pod = {"containers": [{"name": "trainer", "image": "train:1", "command": ["python", "train.py"]}]}
        await users.create(
            job_manifest(
                recovery={"forceDeleteAfterSeconds": 0},
                # No scheduler, so that only the test writes their phase.
                template={"spec": pod | {"terminationGracePeriodSeconds": 1, "schedulerName": "nobody"}},
            )
        )
        lost = [await users.run_pod("digits-1", index, node="node-that-is-gone") for index in (0, 1)]
        await users.phase("digits", "Running")
        ends: dict[str, tuple[str, str]] = {}
        watching = asyncio.create_task(note_ends(users, ends))
        await users.delete("Pod", lost[1]["metadata"]["name"])
        names = {result["metadata"]["name"] for result in lost}
        for name in names:
            await users.gone("Pod", name)
        after = await users.resource("digits", lambda resource: resource["status"].get("attempt") == 2)
        await users.until(lambda: names <= set(ends), "news of the lost pods' ends")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert {ends[name] for name in names} == {("Failed", "NodeLost")}
    assert after["status"]["failedNodes"] == ["node-that-is-gone"]
    assert read_counts(after["status"])["counted"] == 0


@pytest.mark.nightly
async def test_lost_node_is_no_longer_avoided_once_it_is_ready_for_a_while(
    plane: ControlPlane, namespace: str, start: StartProcess
) -> None:
    start()
    node = f"returns-{namespace}"
    async with ClusterActors(plane.admin, namespace) as users:
        pod = {"containers": [{"name": "trainer", "image": "train:1", "command": ["python", "train.py"]}]}
        await users.create(
            job_manifest(
                recovery={"forceDeleteAfterSeconds": 0},
                template={"spec": pod | {"terminationGracePeriodSeconds": 1, "schedulerName": "nobody"}},
            )
        )
        lost = [await users.run_pod("digits-1", index, node=node) for index in (0, 1)]
        await users.delete("Pod", lost[1]["metadata"]["name"])
        after = await users.resource("digits", lambda resource: resource["status"].get("attempt") == 2)
        assert after["status"]["failedNodes"] == [node]
        running = [await users.run_pod("digits-2", index) for index in (0, 1)]
        await users.phase("digits", "Running")

        raise_node(plane, node)
        for seconds in range(0, 150, 5):
            renew_lease(plane, node, serial=seconds)
            resource = await users.resource("digits")
            if "failedNodes" not in resource["status"]:
                break
            await asyncio.sleep(5)
        plane.kubectl("delete", "node", node)
        pods = [await users.pod("digits-2", index) for index in (0, 1)]
    assert ("failedNodes" in resource["status"], resource["status"]["attempt"]) == (False, 2)
    assert seconds >= 60
    assert resource["status"]["operatorState"]["lostNodes"] == [node]
    assert [pod["metadata"]["uid"] for pod in pods] == [pod["metadata"]["uid"] for pod in running]


def raise_node(plane: ControlPlane, name: str) -> None:
    """Create a node that is Ready, as its kubelet would."""
    plane.kubectl(
        "create", "-f", "-", stdin=yaml.safe_dump({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    )
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}}
    plane.kubectl("patch", "node", name, "--subresource=status", "-p", json.dumps(ready))


def renew_lease(plane: ControlPlane, name: str, serial: int) -> None:
    """Write the Lease of a node. ``serial``: makes each write another one, as the time of a kubelet does."""
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": "kube-node-lease"},
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": 40,
            "renewTime": f"2026-11-20T12:{serial // 60:02}:{serial % 60:02}.000000Z",
        },
    }
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(lease))


async def test_launcher_belongs_to_definition_and_children_to_job(
    plane: ControlPlane, namespace: str, actors: ClusterActors, start: StartProcess
) -> None:
    """Without the operator, Kubernetes deletes the children with the job, and keeps the launcher for the next one."""
    operator = start()
    await actors.create(job_manifest())
    await actors.run_pod("digits-1", 0)
    await actors.until(
        lambda: actors.list("ConfigMap", f"{LABEL_JOB_NAME}="), "the launcher, which no pod here waits for"
    )
    operator.stop()
    [launcher] = await actors.list("ConfigMap", f"{LABEL_JOB_NAME}=")
    definition = json.loads(plane.kubectl("get", "crd", CRD_NAME, "-o", "json").stdout)
    assert owner_uids(launcher) == {definition["metadata"]["uid"]}
    plane.kubectl("delete", "ddp", "digits", "-n", namespace)
    await actors.until(lambda: _no_child_left(actors), "no child left")
    assert await actors.list("ConfigMap", f"{LABEL_JOB_NAME}=") == [launcher]


async def _no_child_left(actors: ClusterActors) -> bool:
    for kind in ("Job", "Pod", "Service"):  # the Secret precedes the Job, and is used when the spec is corrected
        if await actors.list(kind, LABEL_JOB_NAME):
            return False
    return True


@asynccontextmanager
async def serve_report(*texts: str) -> AsyncIterator[int]:
    """Serve the last of these reports as pod 0 does, after each former one once."""
    remaining = list(texts)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=remaining.pop(0) if len(remaining) > 1 else remaining[0])

    app = web.Application()
    app.router.add_get("/report", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def test_progress_is_shown_by_kubectl_get(
    plane: ControlPlane, namespace: str, actors: ClusterActors, start: StartProcess
) -> None:
    start()
    numbers = {"samples": 6400, "step": 100, "steps": 100, "loss": 0.25, "epoch": 3, "epochs": 4, "world_size": 2}
    text = page(phase="Running", total_steps=200, step_seconds=50, **numbers)
    async with serve_report(text) as port:
        await actors.create(job_manifest(metrics={"port": port}))
        for index in (0, 1):
            await actors.run_pod("digits-1", index)
        resource = await actors.resource(
            "digits", lambda result: result.get("status", {}).get("progress", {}).get("eta")
        )
    assert resource["status"]["progress"]["epoch"] == 3
    table = plane.kubectl("get", "ddp", "-n", namespace, "-o", "wide").stdout
    head, row = table.strip().splitlines()
    assert head.split()[:8] == ["NAME", "PHASE", "REASON", "NODES", "PROGRESS", "ETA", "THROUGHPUT", "LOSS"]
    assert {"digits", "50.0%", "50s", "256", "0.25", "3"} <= set(row.split())


async def test_held_job_is_shown_with_its_runs_and_fails_as_its_last_one_when_released(
    plane: ControlPlane, namespace: str, actors: ClusterActors, start: StartProcess
) -> None:
    start()
    began = time.time()
    failure = {"category": "OOM", "podIndex": 1, "rank": 1, "message": "CUDA out of memory", "time": began + 2}
    first = page(phase="Running", step=7, steps=7, dev={"run": 1, "started": began})
    ended = {"run": 2, "digest": "2" * 64, "started": began + 1, "ended": began + 2, "releaseAt": began + 1802}
    held = page(phase="Held", step=3, steps=3, dev={**ended, "result": "Failed", "failure": failure})
    async with serve_report(first, held) as port:
        await actors.create(job_manifest(metrics={"port": port}, dev={}))
        for index in (0, 1):
            await actors.run_pod("digits-1", index)
        status = (await actors.phase("digits", "Held"))["status"]
        table = plane.kubectl("get", "ddp", "-n", namespace).stdout
    assert status["dev"]["lastRun"] == 1
    assert (status["dev"]["run"], status["lastFailure"]["category"], status["reason"]) == (2, "OOM", "OOM")
    assert {"Held", "OOM"} <= set(table.splitlines()[1].split())
    for index in (0, 1):
        await actors.finish_pod("digits-1", index, exit_code=81, message=json.dumps(last_words("NCCL", secondary=True)))
    status = (await actors.phase("digits", "Failed"))["status"]
    assert (status["attempt"], status["lastFailure"]["message"]) == (1, "CUDA out of memory")
    assert "releaseTime" not in status["dev"]


async def test_killed_leader_is_replaced_and_creates_no_duplicates(
    plane: ControlPlane, namespace: str, actors: ClusterActors, tmp_path: Path
) -> None:
    kubeconfig = plane.account("ddp-operator", "ddp-operator")
    ports = free_ports(2)
    env = {"DDP_OPERATOR_LEASE_SECONDS": "4", "DDP_OPERATOR_LEASE_NAME": namespace}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(OperatorProcess(kubeconfig, tmp_path / f"{port}.log", port=port, env=env))
            for port in ports
        )
        for number in range(5):
            await actors.create(job_manifest(f"job{number}"))
        await actors.child_job("job0-1")
        first.kill()
        for number in range(5):
            for index in (0, 1):
                await actors.run_pod(f"job{number}-1", index)
            resource = await actors.phase(f"job{number}", "Running")
            assert (resource["status"]["attempt"], read_counts(resource["status"])["total"]) == (1, 0)
        assert len(await actors.list("Job")) == 5
        assert "became leader as" in second.log
        lease = json.loads(plane.kubectl("get", "lease", namespace, "-n", "ddp-operator", "-o", "json").stdout)
        assert lease["spec"]["leaseTransitions"] == 1


async def test_invalid_pod_template_is_refused_with_api_server_message(
    actors: ClusterActors, start: StartProcess
) -> None:
    start()
    manifest = job_manifest()
    manifest["spec"]["template"]["spec"]["containers"][0]["resorces"] = {}
    await actors.create(manifest)
    resource = await actors.resource("digits", lambda result: result.get("status", {}).get("conditions"))
    (accepted,) = [entry for entry in resource["status"]["conditions"] if entry["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert "resorces" in accepted["message"]
    assert await _no_child_left(actors)


async def test_explain_and_scale_work(plane: ControlPlane, namespace: str, actors: ClusterActors) -> None:
    assert "nodes" in plane.kubectl("explain", "ddp.spec").stdout
    assert "torchrun" in plane.kubectl("explain", "ddp.spec.nodes").stdout
    await actors.create(job_manifest())
    plane.kubectl("scale", "ddp/digits", "--replicas=4", "-n", namespace)
    resource = await actors.get(KIND, "digits")
    assert resource is not None
    assert resource["spec"]["nodes"] == 4


async def test_definition_keeps_counts_that_the_release_before_has_stored(actors: ClusterActors) -> None:
    await actors.create(job_manifest())
    await actors.patch(KIND, "digits", {"status": OF_0_2_0}, "status")
    stored = await actors.get(KIND, "digits")
    assert stored is not None
    status = read_status(stored)
    assert (status.state_problem, status.status.counts) == ("", read_status({"status": OF_0_2_0}).status.counts)
    assert status.status.operator_state.children == tuple(OF_0_2_0["children"])


async def test_job_that_has_ended_cannot_be_scaled(plane: ControlPlane, namespace: str, actors: ClusterActors) -> None:
    await actors.create(job_manifest())
    status = {"attempt": 1, "phase": "Failed", "completionTime": "2026-11-20T12:00:00Z"}
    await actors.patch(KIND, "digits", {"status": status}, "status")
    refused = plane.kubectl("scale", "ddp/digits", "--replicas=4", "-n", namespace, check=False)
    assert "spec.nodes can't be changed once the job has ended; delete the job and create it again" in refused.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 0}, "spec.nodes"),
        ({"nodse": 2}, 'unknown field "spec.nodse"'),
        ({"procPerNode": "many"}, "spec.procPerNode"),
        ({"metrics": {"port": 80}}, "spec.metrics.port"),
    ],
)
def test_bad_spec_is_refused_by_kubectl_apply(
    plane: ControlPlane, namespace: str, change: dict[str, Any], words: str
) -> None:
    manifest = job_manifest(**change)
    done = plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest), check=False)
    assert done.returncode != 0
    assert words in done.stderr


async def test_template_can_be_changed_until_pod_has_run(
    plane: ControlPlane, namespace: str, actors: ClusterActors, start: StartProcess
) -> None:
    start()
    manifest = job_manifest()
    plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest))
    await actors.resource("digits", lambda resource: resource.get("status", {}).get("attempt"))
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["image"] = "train:2"
    plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest))

    async def has_new_image() -> bool:
        job = await actors.get("Job", "digits-1")
        return job is not None and job["spec"]["template"]["spec"]["containers"][0]["image"] == "train:2"

    await actors.until(has_new_image, "a Job of the new template")
    await actors.run_pod("digits-1", 0)
    await actors.resource("digits", lambda result: result["status"].get("firstRunTime"))
    container["image"] = "train:3"
    done = plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest), check=False)
    assert done.returncode != 0
    assert "delete the job and create it again" in done.stderr


def test_name_too_long_for_pod_host_names_is_refused(plane: ControlPlane, namespace: str) -> None:
    manifest = job_manifest("x" * 60)
    done = plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest), check=False)
    assert done.returncode != 0
    assert "choose a shorter name" in done.stderr
