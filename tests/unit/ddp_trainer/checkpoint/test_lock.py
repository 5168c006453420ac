"""At most one run at a time in a folder of checkpoints without attempt numbers."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_sdk.errors import UserError
from ddp_trainer.checkpoint import CheckpointConfig, lock
from ddp_trainer.checkpoint.fence import Fence
from ddp_trainer.checkpoint.lock import FolderLock
from ddp_trainer.checkpoint.store import Checkpointer

HOLDER = """
import os, sys
from pathlib import Path
from ddp_trainer.checkpoint.lock import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
child = os.fork()  # as a reader of data, which may outlive its rank for a moment
if child == 0:
    os.read(0, 1)
    os._exit(0)
print("held", flush=True)
os.read(0, 1)
os._exit(0)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.stdin.close()  # the end of its child
        process.stdout.close()
        process.wait()


def test_folder_in_use_is_refused_with_other_process(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "_MAX_WAIT_SECONDS", 0.3)
    checkpointer = Checkpointer(CheckpointConfig(dir=str(tmp_path)))
    (tmp_path / ".step-000000001.pt.1.tmp").touch()
    with pytest.raises(UserError, match=rf"{tmp_path} is in use by process {holder.pid} on .*; stop that run"):
        checkpointer.claim()
    assert (tmp_path / ".step-000000001.pt.1.tmp").exists(), "the other run is writing it"
    assert capsys.readouterr().err.count("waiting up to 0.3 s") == 1


def test_folder_of_killed_process_is_acquired_while_child_lives(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(lock, "_MAX_WAIT_SECONDS", 0.0)
    checkpointer = Checkpointer(CheckpointConfig(dir=str(tmp_path)))
    checkpointer.claim()
    assert f'"pid": {os.getpid()}' in (tmp_path / lock.FILE).read_text()
    checkpointer.close()
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_removed_file_is_not_mistaken_for_folders_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fcntl.lockf
    replaced = False

    def replace_first(descriptor: int, operation: int) -> None:
        nonlocal replaced
        original(descriptor, operation)
        if not replaced:  # the holder has removed it, and a third run has created another one
            replaced = True
            (tmp_path / lock.FILE).unlink()
            (tmp_path / lock.FILE).touch()

    monkeypatch.setattr(fcntl, "lockf", replace_first)
    folder_lock = FolderLock(tmp_path)
    folder_lock.acquire()
    assert f'"pid": {os.getpid()}' in (tmp_path / lock.FILE).read_text()
    folder_lock.release()


def test_file_system_without_locks_is_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    folder_lock = FolderLock(tmp_path)
    folder_lock.acquire()
    folder_lock.release()
    assert "does not support locks: run only one run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": "a", "pid": 1e999, "started": 1}', b"\xff" * 5000])
def test_unreadable_owner_is_another_run(
    content: bytes, tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / lock.FILE).write_bytes(content)
    monkeypatch.setattr(lock, "_MAX_WAIT_SECONDS", 0.0)
    with pytest.raises(UserError, match="is in use by another run"):
        FolderLock(tmp_path).acquire()


def test_fence_replaces_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    Checkpointer(CheckpointConfig(dir=str(tmp_path)), Fence(tmp_path, 1, "job-1")).claim()
