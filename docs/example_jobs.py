"""A cluster with jobs in different states, for the pictures of `ddp ui`: people ask about each of them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from ddp_cli.client.api import Api, Object, api_path, job_path
from ddp_cli.client.errors import ApiError
from ddp_cli.features.ui.server import Server
from ddp_cli.features.ui.sources import ClusterJobs
from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import format_time, utc_now
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.records import to_json
from ddp_pod.contract.report import PodReport

NAMESPACE = "vision"
NOW = utc_now()
SLOW_RANK = 11
RANKS = 16


def at(minutes: float) -> str:
    """Return a time before now; negative minutes: after it."""
    return format_time(NOW - timedelta(minutes=minutes))


def condition(kind: str, status: str, reason: str, message: str, minutes: float) -> dict[str, str]:
    """Return a condition since some minutes."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at(minutes)}


def trains(minutes: float) -> list[dict[str, str]]:
    """Return the conditions of a job that trains."""
    return [
        condition("Accepted", "True", "Valid", "the job is valid", minutes + 9),
        condition("Scheduled", "True", "PodsRunning", "4/4 pods scheduled", minutes + 6),
        condition("Rendezvoused", "True", "Joined", "all pods joined", minutes + 1),
        condition("Progressing", "True", "Training", "training", minutes),
    ]


def curve(
    minutes: float, step: int, floor: float, restarts: dict[int, int] | None = None, ended: float = 0.0
) -> dict[str, Any]:
    """Return the rows of a status. ``restarts``: where the number of restarts grows, and the steps that are lost."""
    rows = []
    lost = 0
    count = 0
    for number in range(60):
        if restarts and number in restarts:
            lost += restarts[number]
            count += 1
        done = max(1, int(step * (number + 1) / 60) - lost)
        noise = 0.05 * math.sin(number * 2.1) + 0.03 * math.sin(number * 5.3)
        loss = floor + 2.2 * math.exp(-done / (step / 4)) + noise
        time = (NOW - timedelta(minutes=ended + minutes * (1 - number / 59))).timestamp()
        rows.append(f"{time:.0f},{count},{done},{loss:.4f},{1180 + 30 * math.sin(number / 3):.0f}")
    return {"columns": "time,restarts,step,loss,samples_per_second", "rows": rows}


def progress(step: int, total: int, loss: float, **more: Any) -> dict[str, Any]:
    """Return the progress of a status."""
    percent = f"{100 * step / total:.1f}%"
    rates = {"throughput": "1,183 samples/s", "samplesPerSecond": "1183", "stepsPerSecond": "1.15"}
    return {"step": step, "totalSteps": total, "percent": percent, "loss": f"{loss:.4g}", **rates, **more}


def job(name: str, phase: str, minutes: float, *, arguments: tuple[str, ...] = (), **status: Any) -> Object:
    """Return a job that was created some minutes ago."""
    container = {
        "name": "trainer",
        "image": "registry.example/vision:7",
        "command": ["python", "train.py", *arguments],
        "resources": {"limits": {"nvidia.com/gpu": "4"}},
    }
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"}
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "metadata": {**metadata, "creationTimestamp": at(minutes + 10)},
        "spec": {"nodes": 4, "template": {"spec": {"containers": [container]}}},
        "status": {
            "phase": phase,
            "observedGeneration": 1,
            "attempt": 1,
            "nodes": {"desired": 4, "ready": 4 if phase == "Running" else 0},
            "startTime": at(minutes),
            **status,
        },
    }


def make_jobs() -> list[Object]:
    """Return the jobs."""
    memory = {
        "attempt": 1, "rank": 5, "pod": "detr-large-1-1-k2v8p", "node": "gpu-17", "exitCode": 137,
        "category": "OOMKilled", "message": "the kernel killed rank 5 at its memory limit of 80 GiB",
        "remedy": "raise resources.limits.memory, or use fewer workers of the DataLoader", "time": at(129),
    }  # fmt: skip
    label = {
        "attempt": 1, "rank": 3, "pod": "vit-b16-1-3-7dmzq", "node": "gpu-04", "exitCode": 1, "category": "UserError",
        "message": "ValueError: label 1000 is out of range for 1000 classes", "time": at(14),
        "traceback": 'File "train.py", line 88, in step\n    loss = criterion(model(images), labels)\nValueError: …',
        "remedy": "fix the line of the script that the traceback points to",
    }  # fmt: skip
    lost = {
        "attempt": 1, "level": "SamePods", "cause": "OOMKilled", "time": at(129), "step": 21_400, "stepsLost": 400,
        "recoverySeconds": 38,
    }  # fmt: skip
    queue = {"clusterQueue": "gpu-h100", "position": 3, "of": 17, "waitsFor": "nvidia.com/gpu"}
    hang = "no step for 7m: rank 6 on gpu-12 waits for data (train.py:61), its 15 peers wait for it"
    ended = [condition("Complete", "True", "Succeeded", "all pods have succeeded", 30)]
    return [
        job(
            "vit-b16", "Failed", 42, completionTime=at(14), lastFailure=label, progress=progress(1210, 90_000, 4.87),
            history=curve(24, 1210, 4.4, ended=14),
            conditions=[condition("Failed", "True", "UserError", str(label["message"]), 14)],
        ),
        job(
            "clip-base", "Running", 190, progress=progress(31_800, 60_000, 1.92, lastStepTime=at(7)),
            history=curve(176, 31_800, 1.9, ended=7),
            conditions=[*trains(180)[:3], condition("Progressing", "False", "Stalled", hang, 6)],
        ),
        job(
            "segformer", "Pending", 25, startTime=None,
            queue={**queue, "startP50": at(-40), "startP90": at(-80)},
            conditions=[condition("Scheduled", "False", "QuotaPending", "position 3/17 in gpu-h100", 25)],
        ),
        job(
            "detr-large", "Running", 240, progress=progress(48_200, 90_000, 0.71, eta="9h40m"), restarts={"all": 1},
            history=curve(236, 48_200, 0.7, {27: 400}), lastFailure=memory, lastRestart=lost, goodput="96.8%",
            stragglers=[{"rank": SLOW_RANK, "ratio": "1.7", "cause": "compute"}], conditions=trains(230),
        ),
        job(
            "resnet50-lr3", "Running", 65, arguments=("--lr", "0.3"),
            progress=progress(22_000, 30_000, 1.31, eta="24m"), history=curve(60, 22_000, 1.22), conditions=trains(60),
        ),
        job(
            "resnet50-lr1", "Succeeded", 1500, arguments=("--lr", "0.1"), completionTime=at(1410), conditions=ended,
            progress=progress(30_000, 30_000, 1.58), history=curve(84, 30_000, 1.55, ended=1410),
        ),
        job(
            "mae-huge", "Suspended", 900, progress=progress(8000, 40_000, 0.62),
            history=curve(800, 8000, 0.6, ended=60),
            conditions=[condition("Suspended", "True", "Suspended", "spec.suspend is true", 60)],
        ),
        job(
            "yolo-nightly", "Succeeded", 700, completionTime=at(520), progress=progress(50_000, 50_000, 0.88),
            history=curve(170, 50_000, 0.85, ended=520), conditions=ended,
        ),
    ]  # fmt: skip


def make_pods(name: str) -> list[Object]:
    """Return the running pods of a job."""
    return [
        {
            "metadata": {
                "name": f"{name}-1-{index}-x7k2p",
                "namespace": NAMESPACE,
                "uid": f"{name}-{index}",
                "creationTimestamp": at(240),
                "labels": {constants.LABEL_JOB_NAME: name, constants.LABEL_ATTEMPT: "1"},
                "annotations": {constants.ANNOTATION_COMPLETION_INDEX: str(index)},
            },
            "spec": {"nodeName": f"gpu-{12 + index}", "containers": [{"name": "trainer"}]},
            "status": {"phase": "Running"},
        }
        for index in range(4)
    ]


def make_report(index: int) -> bytes:
    """Return the report of a pod, one of whose ranks may be slow."""
    ranks = []
    for rank in range(4 * index, 4 * index + 4):
        own = 0.88 if rank == SLOW_RANK else 0.50 + 0.01 * math.sin(rank)
        counters = RankProgress(rank, step=48_200.0, steps=48_200.0, step_seconds=48_200 * 0.93)
        counters.update({"compute_seconds": 48_200 * own, "data_seconds": 48_200 * 0.03})
        counters.last_step_time = datetime.now().timestamp() - 1
        ranks.append(counters)
    return json.dumps(to_json(PodReport(phase="Running", ranks=tuple(ranks)))).encode()


class ExampleApi(Api):
    """An API server with these jobs, and the pods of one, which never changes."""

    def __init__(self) -> None:
        self.namespace = self.home = NAMESPACE
        self.host = "https://kubernetes.example"

    def request(self, method: str, path: str, query: Any = None, body: Any = None, content_type: str = "") -> Object:
        """Return a list. Raises: ApiError, for one that is not here."""
        lists = {
            job_path(NAMESPACE): make_jobs(),
            api_path("v1", "pods", NAMESPACE): make_pods(str((query or {}).get("labelSelector")).rpartition("=")[2]),
            api_path("v1", "events", NAMESPACE): [],
        }
        if path not in lists:
            raise ApiError(f"{path}: not found", 404)
        return {"items": lists[path], "metadata": {"resourceVersion": "1"}}

    def lines(self, path: str, query: Any = None, *, timeout: float = 30.0) -> Iterator[str]:
        """Yield no change. Logs have a line for each rank."""
        if (query or {}).get("watch"):
            time.sleep(3600)
        index = int(path.split("/")[-2].split("-")[-2]) if path.endswith("/log") else 0
        for rank in range(4 * index, 4 * index + 4):
            yield f"{at(0)[:-1]}.{rank:03}Z [rank{rank}]: epoch 12 step 48200 loss {0.70 + rank / 1000:.3f}"

    def read(self, path: str, limit: int, seconds: float) -> bytes:
        """Return the report of a pod. Raises: ApiError, for other pages."""
        pod = re.search(r"-(\d)-x7k2p:9400/proxy/report$", path)
        if pod is None:
            raise ApiError(f"{path}: not found", 404)
        return make_report(int(pod[1]))


def open_server() -> Server:
    """Return the server of the pages about these jobs."""
    jobs = ClusterJobs(ExampleApi(), everywhere=False)
    jobs.start()
    return Server([jobs], f"namespace {NAMESPACE} of https://kubernetes.example")
