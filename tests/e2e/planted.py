"""Planted failures on a real cluster: what `kubectl get`, `kubectl describe` and `ddp why` report, and how soon.

    python -m tests.e2e.planted [CASE…] [--folder DIR]

needs the variables of ``tests/e2e/conftest.py`` and an operator that the chart has installed. Each case of
``planted_cases.py`` is one short job with one fault. A case is told when the three outputs contain what happened,
where, and the remedy. The program prints a table, and writes the outputs of each case to a file in the folder. Its exit
code is 1 if a case is not told.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from ddp_cli.client.api import connect
from ddp_cli.client.cluster_backend import ClusterBackend

from .conftest import UserNamespace, new_namespace
from .planted_cases import CASES, Case
from .test_cluster import script_job

_PATIENCE: Final = 150.0
"""Seconds from the fault, or until there is one, after which a case counts as not told."""
_POLL_SECONDS: Final = 2.0
_FAULT: Final = re.compile(r"^fault at ([\d.]+)$", re.MULTILINE)


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
    job["spec"].pop("securityProfile", None)  # it refuses sidecars with capabilities
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
    for item in case.objects:
        assert cluster.apply(item).returncode == 0
    began = time.time()
    applied = cluster.apply(build_job(name, case))
    if applied.returncode:
        return FaultReport(None, "", "", applied.stderr, ("applied",))
    with ExitStack() as stack:
        struck = began if case.is_planted_at_once else None
        if case.inflict is not None:
            cluster.until(lambda: cluster.status(name).get("progress", {}).get("step"), f"{name} trains")
            struck = time.time()
            stack.enter_context(case.inflict(cluster, name))
        return watch(cluster, name, case, struck)


def watch(cluster: UserNamespace, name: str, case: Case, struck: float | None) -> FaultReport:
    """Read the three outputs until they tell the fault. ``struck``: its time; None until it is reported."""
    deadline = time.time() + _PATIENCE
    while True:
        if struck is None:
            struck = find_fault(cluster, name, case)
            deadline = time.time() + _PATIENCE if struck is None else struck + _PATIENCE
        get, describe, why = read_outputs(cluster, name)
        missing = find_missing(case, get, describe, why)
        now = time.time()
        if struck is not None and not missing:
            return FaultReport(now - struck, get, describe, why, ())
        if now > deadline:
            return FaultReport(None, get, describe, why, missing)
        time.sleep(_POLL_SECONDS)


def read_outputs(cluster: UserNamespace, name: str) -> tuple[str, str, str]:
    """Return the outputs of `kubectl get`, `kubectl describe` and `ddp why`, of about the same moment."""
    with ThreadPoolExecutor() as pool:
        get = pool.submit(lambda: cluster.kubectl("get", "ddp", name).stdout)
        describe = pool.submit(describe_job, cluster, name)
        why = pool.submit(explain, cluster, name)
        return get.result(), describe.result(), why.result()


def explain(cluster: UserNamespace, name: str) -> str:
    """Return the text of `ddp why`, without the start of an interpreter, which may take longer than a state lasts."""
    return str(ClusterBackend(connect(kubeconfig=cluster.kubeconfig, namespace=cluster.namespace)).why(name))


def find_fault(cluster: UserNamespace, name: str, case: Case) -> float | None:
    """Return the time of the fault in Unix seconds: of the kubelet's Event, or as a container has printed it."""
    if case.event:
        events = cluster.core.list_namespaced_event(cluster.namespace, field_selector=f"reason={case.event}").items
        return min((event.first_timestamp.timestamp() for event in events), default=None)
    selector = f"ddp-operator.dev/job-name={name}"
    logs = cluster.kubectl("logs", "--selector", selector, "--all-containers", "--tail=-1").stdout
    return min(map(float, _FAULT.findall(logs)), default=None)


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
        message = "; ".join(report.missing) or " ".join(report.why.split())
        print(f"| {title} | {told} | {' '.join(line.split())} | {message} |", flush=True)
        outputs = f"{report.get}\n{report.describe}\n\n{report.why}\n\nmissing: {report.missing}\n"
        (arguments.folder / f"{name}.txt").write_text(outputs)
    return int(untold > 0)


if __name__ == "__main__":
    sys.exit(main())
