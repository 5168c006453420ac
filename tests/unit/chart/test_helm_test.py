"""The program that `helm test` runs, against the stand-in API server."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import CHART, render
from tests.support.standin import StandIn

from .test_rendering import submitted

JOBS = "/apis/ddp-operator.dev/v1alpha1/namespaces/default/ddptrainingjobs"
NAME = "ddp-operator-test"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as standin:
        yield standin


class Program:
    """One run of it."""

    def __init__(self, server: StandIn, folder: Path, *, seconds: float = 300) -> None:
        (folder / "token").write_text("secret\n")
        (folder / "job.json").write_text(submitted(render(namespace="default")))
        self.server = server
        self.process = subprocess.Popen(
            [sys.executable, CHART / "files" / "helm_test.py", folder / "job.json", str(seconds)],
            env=os.environ | {"KUBERNETES_SERVER": server.url, "SERVICE_ACCOUNT": str(folder)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.server.url + path, method=method, data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/merge-patch+json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def report(self, **status: Any) -> None:
        """Write the status as the operator would, once the job exists."""
        deadline = time.monotonic() + 300
        while not self.call("GET", JOBS)["items"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.call("PATCH", f"{JOBS}/{NAME}/status", {"status": status})

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=300)
        return self.process.returncode, output


@pytest.mark.parametrize(
    ("env", "server"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://10.96.0.1:6443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, "https://[fd00::1]:443"),
        ({}, "https://kubernetes.default.svc:443"),
    ],
)
def test_server_address_needs_no_cluster_dns(env: dict[str, str], server: str) -> None:
    program = runpy.run_path(str(CHART / "files" / "helm_test.py"))
    assert program["find_server"](env) == server


def test_job_that_fails_shows_why(server: StandIn, tmp_path: Path) -> None:
    condition = {"type": "Failed", "status": "True", "reason": "UserError", "message": "no such flag"}
    condition["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    failure = {"attempt": 1, "category": "UserError", "rank": 1}
    with Program(server, tmp_path) as program:
        program.report(phase="Failed", conditions=[condition], lastFailure=failure)
        code, output = program.end()
        assert code == 1
        assert "Failed: UserError: no such flag" in output
        assert '"rank": 1' in output
        assert program.call("GET", JOBS)["items"] == []


def test_helm_test_fails_for_job_that_no_operator_serves(server: StandIn, tmp_path: Path) -> None:
    with Program(server, tmp_path, seconds=0.1) as program:
        code, output = program.end()
        assert code == 1
        assert "not seen by the operator yet\nno end after 0 s" in output
        assert program.call("GET", JOBS)["items"] == []


@pytest.mark.parametrize("status", [401, 403])
def test_removed_account_is_no_traceback(server: StandIn, tmp_path: Path, status: int) -> None:
    server.faults.add(status, verb="get", resource="ddptrainingjobs", name=NAME, times=1000)
    server.faults.add(status, verb="delete", resource="ddptrainingjobs", times=1000)
    with Program(server, tmp_path) as program:
        code, output = program.end()
        assert (code, "Traceback" in output) == (1, False)
        assert f"cannot read the job: HTTP {status}; Helm removes this account" in output
