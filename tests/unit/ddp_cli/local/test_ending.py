"""The record of a run whose `ddp run` has ended: which process closes it, when, and never beside a living writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ddp_cli.client.local import LocalBackend
from ddp_cli.local.ending import describe_run, explain_interruption, interrupt, read_record, read_summary
from ddp_cli.local.folder import RunFolder
from ddp_operator.api.status import Phase, Status
from tests.support.builders import NOW, page, resource
from tests.support.decisions import present

WRITER = """
import json, sys
from datetime import UTC, datetime
from pathlib import Path
from ddp_cli.local.folder import RunFolder
job = json.load(sys.stdin)
folder = RunFolder.create(Path(sys.argv[1]), "x", datetime.now(UTC))
folder.write_manifest("kind: K", [], {}, "ddp run job.yaml --cpu")
folder.write_status(job)
print(folder.path, flush=True)
import time
time.sleep(600)
"""
RUNNING = {
    "phase": "Running",
    "attempt": 1,
    "startTime": "2026-11-20T12:00:00Z",
    "progress": {"step": 7},
    "checkpoint": {"step": 5},
    "conditions": [
        {"type": "Progressing", "status": "True", "reason": "Training", "lastTransitionTime": "2026-11-20T12:00:00Z"}
    ],
}
STALLED = {
    "conditions": [
        {
            "type": "Progressing",
            "status": "False",
            "reason": "Stalled",
            "message": "no step since 12:00",
            "lastTransitionTime": "2026-11-20T12:00:00Z",
        }
    ]
}


@pytest.fixture
def writer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that writes a run folder and prints its path."""
    line = [sys.executable, "-c", WRITER, str(tmp_path / "runs")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        job = resource(checkpoint={"path": "/ckpt", "claimName": "c"})
        process.stdin.write(json.dumps(job | {"status": RUNNING | getattr(request, "param", {})}))
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


def folder_of(writer: subprocess.Popen[str], *, kill: bool) -> RunFolder:
    assert writer.stdout is not None
    folder = RunFolder(Path(writer.stdout.readline().strip()))
    if kill:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    return folder


def status_of(folder: RunFolder) -> dict[str, Any]:
    return dict(yaml.safe_load(folder.status.read_text())["status"])


def phase_of(folder: RunFolder) -> str:
    return str(read_record(folder)["status"]["phase"])


def test_killed_run_reads_as_interrupted_with_remedy_and_nothing_is_written(writer: subprocess.Popen[str]) -> None:
    folder = folder_of(writer, kill=True)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    status = read_record(folder)["status"]
    (failed,) = (condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert (status["phase"], failed["status"], failed["reason"]) == ("Failed", "True", "Interrupted")
    assert failed["message"] == (
        "`ddp run` was killed while the job was Running. Resume from the checkpoint of step 5 on claim c with: "
        "ddp run job.yaml --cpu"
    )
    assert status["progress"]["step"] == 7
    assert "Interrupted after " in read_summary(folder)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("writer", [{"phase": "Succeeded"}, {"phase": "Failed"}, {"phase": "Rejected"}], indirect=True)
def test_run_that_has_ended_keeps_its_end(writer: subprocess.Popen[str]) -> None:
    folder = folder_of(writer, kill=True)
    assert phase_of(folder) == status_of(folder)["phase"] != "Running"


@pytest.mark.parametrize("text", ["", "a: [1\n", "- 1\n", "kind: K\n", "status: 3\nmetadata: {}\n"])
def test_foreign_file_is_no_record(writer: subprocess.Popen[str], text: str) -> None:
    folder = folder_of(writer, kill=True)
    text = folder.status.read_text().partition("\n")[0] + "\n" + text
    folder.status.write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011
        read_record(folder)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "stopped by Ctrl-C while the job was Running. spec.checkpoint is not set"),
        (signal.SIGTERM, "stopped by SIGTERM while the job was Running. spec.checkpoint is not set"),
        (None, "`ddp run` was killed while the job was Running. spec.checkpoint is not set"),
        (
            signal.SIGHUP,
            "stopped by SIGHUP (its terminal was closed; nohup, setsid or tmux keeps a run) while the job was Running "
            "(Stalled: no step since 12:00).",
        ),
    ],
)
def test_interruption_names_signal_and_what_held_the_job_up(number: int | None, words: str) -> None:
    status = msgspec.convert(RUNNING | STALLED, Status) if number == signal.SIGHUP else Status(phase="Running")
    assert explain_interruption({"spec": {}}, status, "ddp run job.yaml", number=number).startswith(words)


@pytest.mark.parametrize("writer", [STALLED], indirect=True)
def test_live_run_is_explained_with_its_remedy_for_this_machine(writer: subprocess.Popen[str]) -> None:
    folder = folder_of(writer, kill=False)
    why = LocalBackend(folder.path.parent).why(folder.path.name)
    assert "no step since 12:00" in why.what
    assert "stacks" in why.todo
    assert "kubectl" not in why.todo


@pytest.mark.parametrize(("phase", "is_hinted"), [("Succeeded", True), ("Suspended", True), ("Failed", False)])
def test_summary_of_failed_run_has_no_hint_for_invisible_steps(tmp_path: Path, phase: Phase, is_hinted: bool) -> None:
    folder = RunFolder.create(tmp_path, "x", datetime(2026, 11, 20, tzinfo=UTC))
    folder.reports.mkdir(exist_ok=True)
    (folder.reports / "attempt-1-pod-0.json").write_text(page(stepHint="no step is visible: no Python"))
    summary = describe_run("x", Status(phase=phase, attempt=1), folder, seconds=12.0, interrupted=False)
    assert ("no step is visible: no Python" in summary) == is_hinted


def test_interrupted_job_has_no_remaining_time() -> None:
    progress = {"step": 7, "eta": "1m03s", "etaSeconds": 63, "throughput": "2 steps/s"}
    status = {"phase": "Running", "attempt": 1, "progress": progress}
    ended = present(interrupt(resource() | {"status": status}, "ddp run job.yaml", NOW, number=signal.SIGINT))
    kept = ended["status"]["progress"]
    assert (kept["step"], kept["throughput"], kept.get("eta"), kept.get("etaSeconds")) == (7, "2 steps/s", None, None)
