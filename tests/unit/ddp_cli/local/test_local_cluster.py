"""The local cluster beyond the contract: properties that only a cluster of processes has."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ddp_cli.local.local_cluster import LocalCluster
from ddp_operator.api.cluster import Key
from ddp_operator.api.constants import ANNOTATION_COMPLETION_INDEX, KIND, LABEL_JOB_NAME

# Writes its environment to a file beside its termination message, then follows its orders.
REPORT = """
import json, os, sys
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "executable": sys.executable}
with open(os.path.join(os.environ["OUT"], os.environ["JOB_COMPLETION_INDEX"]), "w") as stream:
    json.dump(seen, stream)
"""


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    opened = LocalCluster(tmp_path / "run", tmp_path / "claims", environ={**os.environ, "RANK": "7", "PET_X": "1"})
    yield opened
    await opened.close()


def job(code: str, *, nodes: int = 1, args: tuple[str, ...] = (), grace: int = 30, **container: Any) -> dict[str, Any]:
    pod = {k: container.pop(k) for k in ("volumes", "subdomain") if k in container}
    trainer = {"name": "trainer", "command": ["python3", "-S", "-c", code], "args": list(args), **container}
    spec = {"containers": [trainer], "terminationGracePeriodSeconds": grace, **pod}
    return {
        "kind": "Job",
        "metadata": {"name": "j", "namespace": "default"},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 100,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [137, 143]}}]
            },
            "template": {"metadata": {"labels": {"x": "y"}}, "spec": spec},
        },
    }


async def happens(probe: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while True:
            if probe():
                return
            await asyncio.sleep(0.01)


async def until(cluster: LocalCluster, ready: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    await happens(lambda: ready(cluster.store.list("Job")[0]))
    (current,) = cluster.store.list("Job")
    return current


def finished(current: dict[str, Any]) -> bool:
    conditions = current["status"].get("conditions", ())
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)


def terminated(cluster: LocalCluster) -> list[dict[str, Any]]:
    pods = cluster.store.list("Pod")
    return [p["status"]["containerStatuses"][0]["state"]["terminated"] for p in pods]


async def report(cluster: LocalCluster, out: Path, nodes: int = 1, **changes: Any) -> list[dict[str, Any]]:
    out.mkdir()
    changes["env"] = [{"name": "OUT", "value": str(out)}, *changes.get("env", ())]
    await cluster.create(job(REPORT, nodes=nodes, **changes))
    await until(cluster, finished)
    return [json.loads((out / str(index)).read_text()) for index in range(nodes)]


async def test_pod_knows_its_index_and_addresses_of_its_peers(cluster: LocalCluster, tmp_path: Path) -> None:
    env = [{"name": "MASTER_ADDR", "value": "j-0.s"}, {"name": "PEER", "value": "j-1.s.default.svc:1"}]
    first, second = await report(
        cluster, tmp_path / "out", 2, env=env, subdomain="s", args=("$(JOB_COMPLETION_INDEX)",)
    )
    assert (first["argv"], second["argv"]) == (["0"], ["1"])
    assert second["env"]["MASTER_ADDR"] == "127.0.0.1"
    assert second["env"]["PEER"] == "127.0.100.101:1"


async def test_unresponsive_pod_is_killed_after_grace_period(cluster: LocalCluster, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(ready)!r}, 'w'); time.sleep(600)"
    await cluster.create(job(code, grace=0))
    await happens(ready.exists)
    (pod,) = cluster.store.list("Pod")
    await cluster.delete("Pod", "default", pod["metadata"]["name"], uid=pod["metadata"]["uid"])
    current = await until(cluster, lambda current: current["status"].get("failed") == 1)
    assert current["status"]["active"] == 1, "137 is answered by a new pod"


@pytest.mark.parametrize(
    ("policy", "code", "message"),
    [
        ("File", 3, ""),
        ("FallbackToLogsOnError", 3, "the last words\n"),
        ("FallbackToLogsOnError", 0, ""),
    ],
)
async def test_log_replaces_message_only_if_configured(
    cluster: LocalCluster, policy: str, code: int, message: str
) -> None:
    script = f"import sys; print('the last words'); sys.exit({code})"
    await cluster.create(job(script, terminationMessagePolicy=policy))
    await until(cluster, finished)
    assert terminated(cluster)[0].get("message", "") == message


async def test_termination_message_survives_deletion_with_job(cluster: LocalCluster, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    changes = []
    code = f"""
import os, signal, sys, time
def stop(*_):
    open(os.environ["T"], "w").write("saved at 7")
    sys.exit(85)
signal.signal(15, stop)
open({str(ready)!r}, "w")
time.sleep(600)
"""
    cluster.kubelet.on_end = changes.append
    await cluster.create(job(code, env=[{"name": "T", "value": "/dev/termination-log"}]))
    await happens(ready.exists)
    cluster.stop()
    await happens(lambda: not cluster.kubelet.busy)
    assert cluster.store.list("Pod") == []
    (status,) = changes[0]["status"]["containerStatuses"]
    assert (status["state"]["terminated"]["message"], len(changes)) == ("saved at 7", 1)


async def test_long_termination_message_keeps_its_end(cluster: LocalCluster) -> None:
    script = "import os; open(os.environ['T'], 'w').write('x' * 10_000_000 + 'end')"
    await cluster.create(job(script, env=[{"name": "T", "value": "/dev/termination-log"}]))
    await until(cluster, finished)
    message = terminated(cluster)[0]["message"]
    assert len(message) == 4096
    assert message.endswith("end")


async def test_pods_get_separate_gpus_and_others_wait(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "run", tmp_path / "claims", gpu_ids=["4", "5", "6"])
    out = tmp_path / "out"
    out.mkdir()
    resources = {"limits": {"nvidia.com/gpu": "2"}}
    try:
        await cluster.create(job(REPORT, nodes=2, resources=resources, env=[{"name": "OUT", "value": str(out)}]))
        phases = sorted(p["status"]["phase"] for p in cluster.store.list("Pod"))
        assert phases == ["Pending", "Running"]
        (waiting,) = (p for p in cluster.store.list("Pod") if p["status"]["phase"] == "Pending")
        assert "Insufficient nvidia.com/gpu" in waiting["status"]["conditions"][0]["message"]
        await until(cluster, finished)
    finally:
        await cluster.close()
    seen = [json.loads(path.read_text())["env"]["CUDA_VISIBLE_DEVICES"] for path in out.iterdir()]
    assert seen == ["4,5", "4,5"]


async def test_replacement_pod_continues_log_and_keeps_port(cluster: LocalCluster) -> None:
    code = """
import os, signal
with open(os.environ["DDP_PORT_FILE"], "w") as stream:
    stream.write(os.environ["DDP_METRICS_PORT"].replace("0", "12345", 1))
print("port", os.environ["DDP_METRICS_PORT"], flush=True)
if os.environ["DDP_METRICS_PORT"] == "0":
    signal.pause()
"""
    manifest = job(code)
    manifest["spec"]["template"]["metadata"]["labels"] = {"ddp-operator.dev/attempt": "3"}
    await cluster.create(manifest)
    (pod,) = cluster.store.list("Pod")
    log = cluster.kubelet.log_of(pod)
    assert log.name == "attempt-3-pod-0.log"
    await happens(lambda: cluster.kubelet.port_of(pod) is not None and "port 0\n" in log.read_text())
    await cluster.delete("Pod", "default", pod["metadata"]["name"], uid=pod["metadata"]["uid"])
    await until(cluster, finished)
    assert log.read_text().splitlines()[0] == "port 0"
    assert log.read_text().splitlines()[-1] == "port 12345"


LAST_WORDS = """
import os, signal, sys, time
def end(*_):
    open(os.environ["OUT"] + "/words", "w").write("it was me")
    sys.exit(82)
signal.signal(signal.SIGTERM, end)
open(os.environ["OUT"] + "/ready-" + os.environ["JOB_COMPLETION_INDEX"], "w")
if os.environ["JOB_COMPLETION_INDEX"] == "1":
    while not os.path.exists(os.environ["OUT"] + "/ready-0"):
        time.sleep(0.01)
    sys.exit(86)
time.sleep(600)
"""


async def test_end_of_pod_that_is_deleted_meanwhile_is_still_observed(cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.add({"kind": KIND, "metadata": {"name": "j", "namespace": "default"}, "spec": {}})
    asked = job(LAST_WORDS, nodes=2, env=[{"name": "OUT", "value": str(tmp_path)}])
    asked["spec"]["template"]["metadata"]["labels"] = {LABEL_JOB_NAME: "j"}
    await cluster.create(asked)
    await until(cluster, finished)
    await happens(lambda: (tmp_path / "words").exists() and len(cluster.store.list("Pod")) == 1)
    seen = await cluster.observe(Key("default", "j"))
    assert seen is not None
    ends = {
        p["metadata"]["annotations"][ANNOTATION_COMPLETION_INDEX]: p["status"]["containerStatuses"][0]["state"]
        for p in seen.pods
    }
    assert {index: state["terminated"]["exitCode"] for index, state in ends.items()} == {"0": 82, "1": 86}
