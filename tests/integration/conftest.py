"""What tests of the operator in the loop share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ddp_operator.settings import Settings
from tests.standin import StandIn, World

from .apiserver import ControlPlane
from .running_operator import RunningOperator

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., RunningOperator]


@pytest.fixture
def server() -> Iterator[StandIn]:
    """A stand-in API server with the CRD installed."""
    with StandIn() as standin:
        yield standin


@pytest.fixture
def kubeconfig(server: StandIn, tmp_path: Path) -> Path:
    """A kubeconfig for the stand-in."""
    return server.write_kubeconfig(tmp_path)


@pytest_asyncio.fixture
async def world(kubeconfig: Path) -> AsyncIterator[World]:
    """Users and kubelets."""
    async with World(kubeconfig) as found:
        yield found


@pytest.fixture
def start(kubeconfig: Path) -> Iterator[Start]:
    """Start an operator (or another one, after the first was stopped); what still runs at the end is stopped."""
    with ExitStack() as stack:

        def begin(*, call_timeout: float = 120.0, **settings: Any) -> RunningOperator:
            wanted: dict[str, Any] = {"kubeconfig": str(kubeconfig), "health_port": 0} | settings
            operator = RunningOperator(Settings(**wanted)).start()
            stack.enter_context(operator)
            # What is late is asked for again, but for the checks at the start: after them a call may be given up early.
            operator.operator.client._timeout = call_timeout
            return operator

        yield begin


async def in_thread(function: Callable[..., int], *args: Any) -> int:
    """Call a function in a thread that nobody waits for: one that never returns must not keep a failed test alive."""
    done: concurrent.futures.Future[int] = concurrent.futures.Future()

    def call() -> None:
        with suppress(concurrent.futures.InvalidStateError):  # the test has given up on it
            try:
                done.set_result(function(*args))
            except Exception as error:
                done.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(done)


def job_manifest(name: str = "digits", **spec: Any) -> dict[str, Any]:
    """A small valid custom resource."""
    return {
        "apiVersion": "ddp-operator.dev/v1alpha1",
        "kind": "DDPTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": 2,
            "template": {
                "spec": {"containers": [{"name": "trainer", "image": "train:1", "command": ["python", "train.py"]}]}
            },
        }
        | spec,
    }


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real control plane with the CRD and the operator's account; asked for by tests marked ``apiserver``."""
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as found:
        found.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds" / "ddptrainingjobs.yaml"))
        for name in ("namespace.yaml", "rbac.yaml"):
            found.kubectl("apply", "-f", str(ROOT / "deploy" / "manifests" / name))
        found.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        yield found
