"""The time without a leader after the leader of two operators ends: by SIGKILL, or by SIGTERM as in a drain.

Two processes run at a real API server (KUBEBUILDER_ASSETS). At the moment of the signal a job is created. Prints the
times until the other operator holds the Lease, and until that job has its Job. Asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.bench.figures import table
from tests.support import ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors

NAMESPACE = "ddp-operator"
SIGNALS = {"killed": signal.SIGKILL, "told to stop": signal.SIGTERM}
LIMIT = 300.0


async def measure(plane: ControlPlane, folder: Path, number: signal.Signals, lease_seconds: int) -> tuple[float, float]:
    """Return seconds from the signal to the successor's Lease, and to the new job's Job."""
    kubeconfig = plane.account(NAMESPACE, "ddp-operator")
    name = f"after-{number.name.lower()}-{time.monotonic_ns()}"
    with ExitStack() as stack:
        operators = {}
        for identity, port in zip(("first", "second"), free_ports(2), strict=True):
            env = {"DDP_OPERATOR_IDENTITY": identity, "DDP_OPERATOR_LEASE_SECONDS": str(lease_seconds)}
            log = folder / f"{name}-{identity}.log"
            operators[identity] = stack.enter_context(OperatorProcess(kubeconfig, log, port=port, env=env))
        async with ClusterActors(plane.admin) as users, ClusterActors(plane.admin, NAMESPACE) as home:
            process = operators[await holder(home)].process
            gone = await holder(home)
            assert process is not None
            since = time.perf_counter()
            process.send_signal(number)
            created = asyncio.create_task(users.create(job_manifest(name)))
            lease = job = None
            while lease is None or job is None:
                if lease is None and await holder(home) not in ("", gone):
                    lease = time.perf_counter() - since
                if created.done() and await users.get("Job", f"{name}-1"):
                    job = time.perf_counter() - since
                if time.perf_counter() - since > LIMIT:
                    raise SystemExit(f"nobody took over within {LIMIT:.0f} s: {folder}")
                await asyncio.sleep(0.02)
            await asyncio.to_thread(process.wait)
            operators[gone].process = None
            await created
            await users.delete("DDPTrainingJob", name)
    return lease, job


async def holder(home: ClusterActors) -> str:
    """Return the name of the leader."""
    lease = await home.get("Lease", "ddp-operator")
    return str((lease and lease["spec"].get("holderIdentity")) or "")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure alternately and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lease-seconds", type=int, nargs="+", default=[15])
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, ControlPlane(Path(name)) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy/crds/ddptrainingjobs.yaml"))
        for manifest in ("namespace.yaml", "rbac.yaml"):
            plane.kubectl("apply", "-f", str(ROOT / "deploy/manifests" / manifest))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        for seconds in arguments.lease_seconds:
            leads: dict[str, list[float]] = {word: [] for word in SIGNALS}
            acts: dict[str, list[float]] = {word: [] for word in SIGNALS}
            for _ in range(arguments.repeats):
                for word, number in SIGNALS.items():
                    lease, job = asyncio.run(measure(plane, Path(name), number, seconds))
                    leads[word].append(lease)
                    acts[word].append(job)
            print(table(f"leaseSeconds {seconds}: until the other one leads", leads), flush=True)
            print(table(f"leaseSeconds {seconds}: until a job created at the signal has its Job", acts), flush=True)
            print(json.dumps({"leads": leads, "acts": acts}), flush=True)


if __name__ == "__main__":
    main()
