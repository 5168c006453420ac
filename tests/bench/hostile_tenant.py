"""One tenant's attacks on a running operator, while another tenant submits jobs.

The real operator's process runs against the stand-in API server. Each attack starts with its jobs, which the operator
lists at its start, and changes them every five seconds. Printed for each: the age of the Lease, the response time of
/healthz, the time from the other tenant's job to its Job, the operator's CPU time and its memory.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import psutil

from ddp_operator.api.constants import KIND
from ddp_operator.api.other_kinds import PROFILE_KIND
from ddp_operator.features import build_definitions
from tests.support.builders import resource
from tests.support.control_plane import free_ports
from tests.support.hostile_jobs import (
    ATTACKER,
    NESTED,
    NESTED_LISTS,
    OWN_ANNOTATION,
    BuildSpec,
    build_hostile_profile,
    build_longest_script,
    build_nested,
    build_profiled,
    build_script,
    build_variables,
)
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors, StandIn
from tests.support.standin.resources import custom_kind

JOBS: Final = 80
SECONDS: Final = 40.0
TOUCH: Final = 5.0
"""Seconds between two changes of each hostile job."""
SUBMIT: Final = 4.0
"""Seconds between two jobs of the other tenant."""
LEASE_SECONDS: Final = 6


@dataclass(frozen=True)
class Attack:
    """The jobs of an attack. ``touch``: the annotation that every change writes; ``early``: before the operator."""

    build: BuildSpec
    touch: str = "example.com/touched"
    early: bool = False


ATTACKS: Final[dict[str, Attack | None]] = {
    "no attack": None,
    "scripts": Attack(build_script),
    "longest scripts": Attack(build_longest_script),
    "longest scripts, own annotation": Attack(build_longest_script, OWN_ANNOTATION),
    "variables, own annotation": Attack(build_variables, OWN_ANNOTATION),
    "a large profile": Attack(build_profiled, OWN_ANNOTATION),
    "events of 1.4 MB": Attack(build_nested),
    "pages of 1.4 MB": Attack(build_nested, early=True),
}


@dataclass
class Figures:
    """What an attack costs the others."""

    ready: float = 0.0
    lease: float = 0.0
    probe: float = 0.0
    starts: list[float] = field(default_factory=list)
    cpu: float = 0.0
    memory: float = 0.0

    def line(self, name: str, width: int) -> str:
        """Return the row as text."""
        columns = (
            f"{name:{width}}",
            f"ready {self.ready:5.1f} s",
            f"lease {self.lease:5.2f} s",
            f"probe {self.probe:5.2f} s",
            f"start {max(self.starts):5.2f} s of {len(self.starts):2}",
            f"CPU {self.cpu:5.1f} s",
            f"memory {self.memory:4.0f} MiB",
        )
        return "  ".join(columns)


def measure_attacks(names: Sequence[str], jobs: int, seconds: float) -> Iterator[str]:
    """Run the attacks one after another. Yield a line for each."""
    width = max(map(len, names))
    for name in names:
        with StandIn() as api, tempfile.TemporaryDirectory() as folder:
            yield measure_attack(api, Path(folder), ATTACKS[name], jobs, seconds).line(name, width)


def measure_attack(api: StandIn, folder: Path, attack: Attack | None, jobs: int, seconds: float) -> Figures:
    """Run one attack against an operator of its own."""
    kubeconfig = api.write_kubeconfig(folder)
    api.add("Namespace", {"metadata": {"name": ATTACKER}, "spec": {}})
    api.insert(NESTED, NESTED_LISTS)
    api.serve(custom_kind(build_definitions()[PROFILE_KIND]))
    api.add(PROFILE_KIND, build_hostile_profile())
    hostile = HostileJobs(api, attack, jobs)
    if attack is not None and attack.early:
        hostile.create()

    (port,) = free_ports(1)
    figures = Figures()
    env = {"DDP_OPERATOR_LEASE_SECONDS": str(LEASE_SECONDS)}
    stop = threading.Event()
    began = time.monotonic()
    with OperatorProcess(kubeconfig, folder / "operator.log", port=port, env=env) as operator:
        figures.ready = time.monotonic() - began
        assert operator.process is not None
        process = psutil.Process(operator.process.pid)
        threads = [
            threading.Thread(target=probe_health, args=(operator.url, figures, stop)),
            threading.Thread(target=watch_lease, args=(api, figures, stop)),
            threading.Thread(target=hostile.run, args=(stop,)),
        ]
        for thread in threads:
            thread.start()
        asyncio.run(submit_jobs(kubeconfig, figures, seconds))
        stop.set()
        for thread in threads:
            thread.join()
        figures.cpu = sum(process.cpu_times()[:2])
        figures.memory = read_peak(process.pid)
    return figures


def read_peak(process: int) -> float:
    """Return the peak resident memory of a process in MiB."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    [peak] = [line for line in lines if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024


def probe_health(url: str, figures: Figures, stop: threading.Event) -> None:
    """Read /healthz as a kubelet does, and note the longest response time."""
    while not stop.wait(0.2):
        began = time.monotonic()
        try:
            with urlopen(f"{url}/healthz", timeout=30) as response:
                response.read()
        except (OSError, HTTPException):
            pass
        figures.probe = max(figures.probe, time.monotonic() - began)


def watch_lease(api: StandIn, figures: Figures, stop: threading.Event) -> None:
    """Note the greatest age of the Lease."""
    while not stop.wait(0.1):
        lease = api.get("Lease", "ddp-operator")
        if lease is not None:
            renewed = datetime.fromisoformat(lease["spec"]["renewTime"])
            figures.lease = max(figures.lease, (datetime.now(UTC) - renewed).total_seconds())


class HostileJobs:
    """The attacker's jobs."""

    def __init__(self, api: StandIn, attack: Attack | None, count: int) -> None:
        self._api = api
        self._attack = attack
        self._count = count
        self._names: list[str] = []

    def create(self) -> None:
        """Create all of them."""
        assert self._attack is not None
        for number in range(self._count):
            name = f"hostile-{number}"
            self._api.add(KIND, resource(name, namespace=ATTACKER, **self._attack.build(number)))
            self._names.append(name)

    def run(self, stop: threading.Event) -> None:
        """Create them, unless they exist, and annotate them again and again."""
        if self._attack is None:
            return
        if not self._names:
            self.create()
        number = 0
        while not stop.wait(TOUCH):
            number += 1
            for name in self._names:
                touch = {self._attack.touch: str(number)}
                self._api.change(KIND, name, lambda job: _annotate(job, touch), ATTACKER)  # noqa: B023


def _annotate(job: dict[str, Any], annotations: Mapping[str, str]) -> None:
    job["metadata"].setdefault("annotations", {}).update(annotations)


async def submit_jobs(kubeconfig: Path, figures: Figures, seconds: float) -> None:
    """Submit the other tenant's jobs one after another, and note when each one's Job exists."""
    ends = time.monotonic() + seconds
    number = 0
    async with ClusterActors(kubeconfig) as actors:
        while time.monotonic() < ends:
            number += 1
            began = time.monotonic()
            await actors.create(resource(f"ordinary-{number}"))
            with suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await actors.child_job(f"ordinary-{number}-1")
            took = time.monotonic() - began
            figures.starts.append(took)
            await asyncio.sleep(max(0.0, SUBMIT - took))
