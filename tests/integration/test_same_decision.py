"""The local cluster, the stand-in and a real API server lead to the same sequence of phases and conditions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ddp_cli.local.local_cluster import LocalCluster
from ddp_cli.local.ports import hold_free_port
from ddp_operator.api.cluster import Key
from ddp_operator.api.constants import EXIT_RETRYABLE, KIND
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import FEATURES
from ddp_operator.manager.settings import Settings
from ddp_operator.reconcile import Reconciler
from ddp_operator.reconcile.turns import Turns
from tests.support import PATIENCE
from tests.support.builders import page
from tests.support.control_plane import ControlPlane
from tests.support.decision_history import FAILURE, NAME, SCRIPT, DecisionHistory, build_resource
from tests.support.running_operator import RunningOperator, Start
from tests.support.standin import ClusterActors

# The sequence on every cluster, written out, so that two equal mistakes are detected.
EXPECTED = {
    "phases": ["Pending", "Running", "Restarting", "Running", "Succeeded"],
    "conditions": {
        "Accepted": [("True", "Valid")],
        "Suspended": [("False", "NotSuspended")],
        "Scheduled": [("False", ""), ("True", ""), ("False", ""), ("True", "")],
        "Rendezvoused": [("False", ""), ("True", ""), ("False", ""), ("True", "")],
        "Progressing": [("False", ""), ("Unknown", ""), ("False", ""), ("Unknown", ""), ("False", "")],
        "Restarting": [("False", "NotRestarting"), ("True", "GroupRestart"), ("False", "NotRestarting")],
        "TrainingComplete": [("Unknown", "NoStep")],
        "Succeeded": [("False", "NotFinished"), ("True", "AllNodesSucceeded")],
        "Failed": [("False", "NotFinished"), ("False", "Finished")],
    },
    "attempt": 2,
    "restarts": {"total": 1, "counted": 1, "free": 0, "inPlace": 0},
    "lastFailure": {
        "attempt": 1,
        "rank": 1,
        "podIndex": 1,
        "exitCode": 1,
        "category": "UserError",
        "message": FAILURE,
    },
}


@pytest.mark.process
async def test_failed_attempt_on_local_cluster_has_expected_history(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    history = DecisionHistory()
    cluster = LocalCluster(tmp_path / "run", tmp_path / "claims")
    wake = asyncio.Event()
    cluster.on_change = wake.set
    key = Key("default", NAME)
    # Its ranks never join the rendezvous, which only real processes show.
    spec = {"rendezvous": {"port": hold_free_port()}, "processGroupPolicy": "Ignore"}
    cluster.add(build_resource(["python", str(script)], **spec))
    reconciler = Reconciler(cluster, turns=Turns(), hooks=Hooks(FEATURES))
    try:
        async with asyncio.timeout(PATIENCE):
            while (history.last.get("phase")) not in ("Succeeded", "Failed"):
                wake.clear()
                wait = await reconciler.reconcile(key)
                resource = cluster.store.get(KIND, key.namespace, key.name)
                assert resource is not None
                history.add(resource.get("status") or {})
                if history.conditions.get("Progressing", [("", "")])[-1][0] == "Unknown":
                    Path(f"{script}.{history.last['attempt']}").touch()
                if wait != 0 and not wake.is_set():
                    try:
                        await asyncio.wait_for(wake.wait(), wait)
                    except TimeoutError:
                        continue
    finally:
        await cluster.close()
    assert history.facts() == EXPECTED


async def test_failed_attempt_on_stand_in_has_expected_history(actors: ClusterActors, start: Start) -> None:
    start(progress_interval=1.0)
    assert (await play(actors)).facts() == EXPECTED


@pytest.mark.apiserver
@pytest.mark.timeout(300)
async def test_failed_attempt_on_real_api_server_has_expected_history(plane: ControlPlane) -> None:
    name = "same-decision"
    plane.kubectl("create", "namespace", name)
    settings = Settings(kubeconfig=str(plane.admin), health_port=0, progress_interval=1.0)
    operator = RunningOperator(settings).start()
    try:
        async with ClusterActors(plane.admin, name) as actors, actors.kubelet():
            history = await play(actors)
    finally:
        operator.stop()
        plane.kubectl("delete", "namespace", name, "--wait=false")
    assert history.facts() == EXPECTED


async def play(actors: ClusterActors) -> DecisionHistory:
    """Play the scenario's pods on an API server with a running operator. Return the observed sequence of the status."""
    with page_server() as (port, page):
        await actors.create(build_resource(["python", "train.py"], metrics={"port": port}))
        async with watching(actors) as history:
            await actors.phase(NAME, "Pending")
            await act_attempt(actors, page, 1)
            root = {"version": 1, "category": "UserError", "exitCode": 1, "rank": 1, "podIndex": 1, "message": FAILURE}
            await actors.finish_pod(f"{NAME}-1", 1, exit_code=EXIT_RETRYABLE, message=json.dumps(root))
            # No process runs pod 0 here: it is gone once the Job controller deletes it.
            await act_attempt(actors, page, 2)
            for index in (0, 1):
                await actors.finish_pod(f"{NAME}-2", index)
            await actors.phase(NAME, "Succeeded")
    return history


async def act_attempt(actors: ClusterActors, page: FakeMetricsPage, attempt: int) -> None:
    """Make both pods run and join, and wait until the status shows it."""
    page.phase = "Rendezvous"
    for index in (0, 1):
        await actors.run_pod(f"{NAME}-{attempt}", index)
    await actors.resource(NAME, lambda r: _condition(r, "Scheduled") == "True", "both pods placed")
    page.phase = "Running"
    await actors.resource(NAME, lambda r: _condition(r, "Rendezvoused") == "True", "all ranks joined")
    await actors.phase(NAME, "Running")


def _condition(resource: Mapping[str, Any], kind: str) -> str:
    conditions = (resource.get("status") or {}).get("conditions") or ()
    return next((str(c["status"]) for c in conditions if c["type"] == kind), "")


@asynccontextmanager
async def watching(actors: ClusterActors) -> AsyncIterator[DecisionHistory]:
    """Record every written status; polling would miss some on a busy machine."""
    history = DecisionHistory()

    async def watch() -> None:
        async for resource in actors.watch(KIND):
            history.add(resource.get("status") or {})

    task = asyncio.create_task(watch())
    try:
        yield history
        last = await actors.get(KIND, NAME)
        await actors.until(lambda: last and history.last == last["status"], "the watch saw the last status")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class FakeMetricsPage:
    """The report of pod 0's launcher."""

    phase = "Starting"

    def __str__(self) -> str:
        return page(phase=self.phase)


class page_server:
    """Serve a Page on 127.0.0.1. Return its port and the page."""

    def __enter__(self) -> tuple[int, FakeMetricsPage]:
        page = FakeMetricsPage()

        class FakePageHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = str(page).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), FakePageHandler)
        self.thread = Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return int(self.server.server_port), page

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
