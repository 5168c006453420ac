"""Planted failures on a real cluster: what `kubectl get`, `kubectl describe` and `ddp why` report, and how soon.

    python -m tests.e2e.planted [CASE…] [--folder DIR]

needs the variables of ``tests/e2e/conftest.py`` and an operator that runs already. Each case is one short job with one
fault. A case is told when the three outputs contain what happened, where, and the remedy. The program prints a table,
and writes the outputs of each case to a file in the folder. Its exit code is 1 if a case is not told.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from .conftest import UserNamespace, new_namespace
from .test_cluster import script_job

_PATIENCE: Final = 150.0
_POLL_SECONDS: Final = 2.0
_FAULT: Final = re.compile(r"^fault at ([\d.]+)$", re.MULTILINE)
_START: Final = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta

def fault():
    print(f"fault at {time.time():.1f}", flush=True)

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def train(step):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.2)
"""
_LOOP: Final = """
for step in range(1, 2000):
    train(step)
    if step == 20 and rank == 1:
        fault()
        FAULT
"""
_TRAIN: Final = _START + "for step in range(1, 2000):\n    train(step)\n"
_SHORT: Final = _START + "for step in range(1, 10):\n    train(step)\nfault()\ndist.destroy_process_group()\n"
_QUICK: Final = {"stallSeconds": 10, "startSeconds": 60, "checkpointSeconds": 60}


def failing(statement: str) -> str:
    """Return a script whose rank 1 runs a statement after step 20."""
    return _START + _LOOP.replace("FAULT", statement)


@dataclass(frozen=True)
class Case:
    """One fault. ``get``, ``describe``, ``why``: what each output contains, as regular expressions.

    ``pod``: members of the pod's spec; ``container``: of the training container.
    """

    script: str
    get: str
    describe: tuple[str, ...]
    why: tuple[str, ...]
    spec: Mapping[str, Any] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)


def sidecar(command: list[str], **members: Any) -> dict[str, Any]:
    """Return a pod's spec with a native sidecar of the same image."""
    container = {"name": "shipper", "command": command, "restartPolicy": "Always", "imagePullPolicy": "IfNotPresent"}
    return {"initContainers": [{**container, **members}]}


def serve(port: int) -> list[str]:
    """Return the command of a web server that is not ours."""
    return ["python3", "-m", "http.server", str(port)]


_WRITE_CACHE: Final = "open('/cache/x', 'wb').write(bytes(40 << 20)); time.sleep(600)"

CASES: Final[dict[str, Case]] = {
    "exception": Case(
        failing("{}['label']"),
        "UserError|RepeatedFailure",
        ("KeyError: 'label'", "rank 1"),
        ("KeyError: 'label'", "rank 1", "(?i)fix"),
    ),
    "exit code": Case(
        failing("os._exit(3)"),
        "RepeatedFailure|Unknown|UserError",
        ("exit(ed)? (with )?code 3", "rank 1"),
        ("exit(ed)? (with )?code 3", "rank 1"),
    ),
    "segmentation fault": Case(
        failing("os.kill(os.getpid(), signal.SIGSEGV)"),
        "Crash|Native|Signal|Unknown|Failed|Restarting",
        ("SIGSEGV", "rank 1"),
        ("SIGSEGV", "rank 1"),
        spec={"recovery": {"inPlaceRestarts": 0, "maxRestarts": 0}},
    ),
    "collective of another size": Case(
        failing("dist.all_reduce(torch.ones(99))"),
        "Failed|Restarting|Running",
        ("(?i)size|mismatch|shape", "rank"),
        ("(?i)size|mismatch|shape",),
        spec={"recovery": {"inPlaceRestarts": 0, "maxRestarts": 0}},
    ),
    "hang": Case(
        failing("time.sleep(1e6)"),
        "Stalled|Hang",
        ("rank 1",),
        ("rank 1", "no step"),
        spec={"watchdog": _QUICK},
    ),
    "busy loop": Case(
        failing("exec('while True: pass')"),
        "Stalled|Hang",
        ("rank 1",),
        ("rank 1", "no step"),
        spec={"watchdog": _QUICK},
    ),
    "memory of the pod": Case(
        failing("hoard = [bytearray(os.urandom(1 << 20)) * 64 for _ in range(100)]"),
        "OOM",
        ("(?i)memory",),
        ("(?i)memory", "(?i)raise|reduce"),
        container={"resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "900Mi"}}},
    ),
    "loss that is not finite": Case(
        failing("optimizer.param_groups[0]['lr'] = float('nan')"),
        "nan",
        ("(?i)nan",),
        ("loss is nan", "(?i)learning rate"),
    ),
    "builds that do not match": Case(
        failing("raise RuntimeError('operator torchvision::nms does not exist')"),
        "UserError|RepeatedFailure",
        ("torchvision::nms", "rank 1"),
        ("torchvision::nms", "(?i)builds? of torch|same|match"),
    ),
    "read-only folder": Case(
        failing("torch.save(model.state_dict(), '/data/checkpoint.pt')"),
        "UserError|RepeatedFailure",
        ("(?i)read-only", "rank 1"),
        ("(?i)read-only", "(?i)mount|writ"),
        pod={"volumes": [{"name": "data", "emptyDir": {}}]},
        container={"volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}]},
    ),
    "missing module": Case(
        "import time; print(f'fault at {time.time():.1f}', flush=True)\nimport no_such_package\n",
        "UserError|RepeatedFailure",
        ("No module named 'no_such_package'",),
        ("no_such_package", "(?i)install|image|code.pip"),
    ),
    "missing program": Case(
        "",
        "Failed",
        ("no-such-program",),
        ("no-such-program", "(?i)not found"),
        container={"command": ["no-such-program"]},
    ),
    "missing image": Case(
        _TRAIN, "ImagePull", ("nobody/has-this",), ("nobody/has-this", "(?i)image"),
        container={"image": "localhost/nobody/has-this:1", "imagePullPolicy": "IfNotPresent"},
    ),
    "missing ConfigMap": Case(
        _TRAIN, "Pending|ConfigError|Config", ("settings",), ("settings", "(?i)create"),
        container={"envFrom": [{"configMapRef": {"name": "settings"}}]},
    ),
    "missing claim": Case(
        _TRAIN, "Pending", ("no-such-claim",), ("no-such-claim",),
        pod={"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "no-such-claim"}}]},
    ),
    "no node with room": Case(
        _TRAIN, "Unschedulable", ("Insufficient cpu",), ("cpu", "(?i)add|reduce|free"),
        container={"resources": {"requests": {"cpu": "500"}}},
    ),
    "taken rendezvous port": Case(
        _TRAIN, "Network|Restarting|Failed", ("29400", "in use"), ("29400", "(?i)port"),
        pod=sidecar(serve(29400)),
    ),
    "taken metrics port": Case(
        _TRAIN, "NoMetricsPage|Network|Failed|Running", ("9400|metrics port",), ("metrics.port",),
        pod=sidecar(serve(9400)),
    ),
    "volume over its limit": Case(
        "import time\nprint(f'fault at {time.time():.1f}', flush=True)\n" + _WRITE_CACHE,
        "Running|Restarting|Failed",
        ('EmptyDir volume "cache" exceeds the limit',),
        ("sizeLimit", "cache"),
        pod={"volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "10Mi"}}]},
        container={"volumeMounts": [{"name": "cache", "mountPath": "/cache"}]},
    ),
    "DNS": Case(
        _TRAIN, "PeerUnreachable", ("does not resolve|resolve",), ("resolve", "DNS"),
        pod={"dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.77"]}},
    ),
    "sidecar that does not end": Case(
        _SHORT, "Finished", ("waits for shipper",), ("native sidecar", "shipper"),
        pod=sidecar(["python3", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(900)"])
        | {"terminationGracePeriodSeconds": 100},
    ),
    "rank that ends early": Case(
        failing("sys.exit(0)"),
        "Stalled|Hang|Failed|Network|Restarting|UserError",
        ("rank 1|ranks? .*ended",),
        ("rank 1|ended",),
    ),
    "no progress to see": Case(
        "import time\nprint(f'fault at {time.time():.1f}', flush=True)\ntime.sleep(1000)\n",
        "NoStepYet",
        ("logPatterns|no step",),
        ("logPatterns|exporter",),
    ),
}  # fmt: skip


class FaultReport(NamedTuple):
    """The three outputs, and seconds from the fault until all of them told it; None if they did not."""

    seconds: float | None
    get: str
    describe: str
    why: str
    missing: tuple[str, ...]


def build_job(name: str, case: Case) -> dict[str, Any]:
    """Return the job of a case."""
    job = script_job(name, case.script or "pass", **{"nodes": 2, **case.spec})
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["resources"] = {"requests": {"cpu": "100m"}}
    container |= case.container
    if container["command"][0] != "python3":
        container["args"] = []
    pod |= {key: value for key, value in case.pod.items() if key != "volumes"}
    pod["volumes"] = [*pod.get("volumes", ()), *case.pod.get("volumes", ())]
    for extra in pod.get("initContainers", ()):
        extra.setdefault("image", container["image"])
    return job


def find_missing(case: Case, get: str, describe: str, why: str) -> tuple[str, ...]:
    """Return what the outputs do not contain yet."""
    wanted = [("get", case.get, get)]
    wanted += [("describe", part, describe) for part in case.describe]
    wanted += [("why", part, why) for part in case.why]
    return tuple(f"{place}: {part}" for place, part, text in wanted if not re.search(part, text))


def describe_job(cluster: UserNamespace, name: str) -> str:
    """Return the conditions and Events of `kubectl describe`, without the spec, which contains the script."""
    text = cluster.kubectl("describe", "ddp", name).stdout
    return text[text.find("\nStatus:") :]


def plant(cluster: UserNamespace, name: str, case: Case) -> FaultReport:
    """Run the job of a case until the three outputs tell its fault."""
    began = time.time()
    applied = cluster.apply(build_job(name, case))
    if applied.returncode:
        return FaultReport(None, "", "", applied.stderr, ("applied",))
    struck = began if case.script in ("", _TRAIN) else None
    deadline = began + _PATIENCE
    while True:
        if struck is None:
            logs = cluster.kubectl("logs", "--selector", f"ddp-operator.dev/job-name={name}", "--tail=-1").stdout
            times = [float(at) for at in _FAULT.findall(logs)]
            struck = min(times) if times else None
            deadline = (struck or began) + _PATIENCE
        get = cluster.kubectl("get", "ddp", name).stdout
        describe = describe_job(cluster, name)
        why = cluster.why(name)
        missing = find_missing(case, get, describe, why)
        now = time.time()
        if struck is not None and not missing:
            return FaultReport(now - struck, get, describe, why, ())
        if now > deadline:
            return FaultReport(None, get, describe, why, missing)
        time.sleep(_POLL_SECONDS)


def main() -> int:
    """Plant the cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--folder", type=Path, default=Path("planted"), help="for the outputs; default: planted")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    untold = 0
    for title in arguments.cases or CASES:
        name = re.sub(r"\W+", "-", title.lower())
        with new_namespace() as cluster:
            report = plant(cluster, name, CASES[title])
        told = f"told after {report.seconds:.0f} s" if report.seconds is not None else "NOT TOLD"
        untold += report.seconds is None
        line = report.get.splitlines()[-1] if report.get else ""
        print(f"| {title} | {told} | {' '.join(line.split())} | {'; '.join(report.missing)} |", flush=True)
        outputs = f"{report.get}\n{report.describe}\n\n{report.why}\n\nmissing: {report.missing}\n"
        (arguments.folder / f"{name}.txt").write_text(outputs)
    return int(untold > 0)


if __name__ == "__main__":
    sys.exit(main())
