from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from ddp_sdk.errors import UserError
from ddp_trainer.checkpoint import CheckpointConfig
from ddp_trainer.checkpoint.fence import Fence
from ddp_trainer.checkpoint.store import Checkpointer
from ddp_trainer.errors import Superseded


def fence(folder: Path, attempt: int, job: str = "uid") -> Fence:
    return Fence(folder, attempt, f"{job}-{attempt}")


def test_job_without_attempts_has_no_fence(tmp_path: Path) -> None:
    assert Fence.from_environ(tmp_path, {}) is None
    assert Fence.from_environ(tmp_path, {"DDP_ATTEMPT": "2", "DDP_RUN_ID": "u-2"}) == Fence(tmp_path, 2, "u-2")
    with pytest.raises(UserError, match=r"DDP_ATTEMPT: is 'two'"):
        Fence.from_environ(tmp_path, {"DDP_ATTEMPT": "two"})


def test_later_attempt_takes_over_and_is_named_by_older(tmp_path: Path) -> None:
    old = fence(tmp_path, 1)
    new = fence(tmp_path, 2)
    old.claim()
    old.check()
    new.claim()
    new.check()
    with pytest.raises(Superseded, match=r"attempt 2 \(run uid-2\) has taken over .*; attempt 1 stops writing"):
        old.check()
    with pytest.raises(Superseded):
        old.claim()
    new.check()


def test_restart_within_attempt_keeps_its_claim(tmp_path: Path) -> None:
    fence(tmp_path, 1).claim()
    fence(tmp_path, 1).claim()
    fence(tmp_path, 1).check()
    assert len(list((tmp_path / "fence").iterdir())) == 1


def test_recreated_job_with_attempt_1_takes_over(tmp_path: Path) -> None:
    old = fence(tmp_path, 4, "old")
    new = fence(tmp_path, 1, "new")
    old.claim()
    new.claim()
    new.check()
    with pytest.raises(Superseded):
        old.check()
    # The agent of the old job restarts its workers; they do not take the folder back.
    with pytest.raises(Superseded):
        old.claim()
    new.check()


def test_concurrent_claims_leave_folder_to_last_attempt(tmp_path: Path) -> None:
    for round_number in range(10):
        folder = tmp_path / str(round_number)
        fences = [fence(folder, attempt) for attempt in range(1, 9)]
        ready = threading.Barrier(len(fences))
        entered: list[int] = []

        def claim(one: Fence, ready: threading.Barrier = ready, entered: list[int] = entered) -> None:
            ready.wait()
            try:
                one.claim()
            except Superseded:
                return
            entered.append(one.attempt)

        threads = [threading.Thread(target=claim, args=(entry,)) for entry in fences]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fences[-1].check()
        for item in fences[:-1]:
            with pytest.raises(Superseded):
                item.check()
        names = sorted(path.name for path in (folder / "fence").iterdir())
        assert names == [f"{number:09d}.json" for number in range(1, len(names) + 1)]
        claims = [json.loads((folder / "fence" / name).read_text())["attempt"] for name in names]
        assert claims == sorted(claims) == sorted(entered)


def test_no_hard_links_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    old = fence(tmp_path, 1)
    new = fence(tmp_path, 2)
    old.claim()
    new.claim()
    new.check()
    with pytest.raises(Superseded):
        old.check()


def test_claim_of_dead_writer_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_trainer.checkpoint.fence._SECONDS_TO_WRITE", 0.0)
    fence(tmp_path, 1).claim()
    (tmp_path / "fence" / "000000002.json").write_text("")
    with pytest.raises(Superseded, match=r"attempt 0 \(run \?\) has taken over"):
        fence(tmp_path, 1).check()
    fence(tmp_path, 2).claim()
    fence(tmp_path, 2).check()


def test_claim_waits_for_late_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence(tmp_path, 2).claim()
    (claim,) = (tmp_path / "fence").iterdir()
    content = claim.read_text()
    claim.write_text("")
    monkeypatch.setattr("time.sleep", lambda seconds: claim.write_text(content))
    fence(tmp_path, 2).check()


# The checkpointer with the fence


def checkpointer(folder: Path, attempt: int) -> Checkpointer:
    store = Checkpointer(CheckpointConfig(dir=str(folder), keep=1), fence(folder, attempt))
    store.prepare()
    store.claim()
    return store


def save(one: Checkpointer, step: int) -> None:
    one.save({"weights": torch.full((3,), float(step))}, step, None, {})
    one.wait()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_superseded_attempt_stops_writing_and_requests_stop(tmp_path: Path) -> None:
    old = checkpointer(tmp_path, 1)
    asked: list[bool] = []
    old.on_superseded = lambda: asked.append(True)
    save(old, 1)
    checkpointer(tmp_path, 2)
    before = files(tmp_path)
    save(old, 2)
    save(old, 3)
    assert files(tmp_path) == before == ["step-000000001-attempt-1.json", "step-000000001-attempt-1.pt"]
    assert asked == [True]
    with pytest.raises(Superseded):
        old.check_fence()


def test_fence_is_checked_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = checkpointer(tmp_path, 1)
    sync = os.fsync

    def overtaken(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        checkpointer(tmp_path, 2)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", overtaken)
    save(old, 1)
    assert old.superseded is not None
    with pytest.raises(Superseded):
        old.check_fence()
    assert files(tmp_path) == []


def test_late_write_cannot_replace_or_remove_later_attempts_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = checkpointer(tmp_path, 1)
    new = checkpointer(tmp_path, 2)
    save(new, 5)
    save(new, 6)
    # The check passes before the other attempt starts, and the write follows long after.
    monkeypatch.setattr(old, "check_fence", lambda: None)
    save(old, 6)
    assert {"step-000000006-attempt-2.json", "step-000000006-attempt-2.pt"} <= set(files(tmp_path))
    newest = new.list()[0]
    assert (newest.step, newest.attempt) == (6, 2)
    assert new.read_newest() == newest.data.read_bytes()
    # It keeps one checkpoint, and its own is the newest now. It must not remove the other attempt's checkpoint.
    save(old, 9)
    assert {"step-000000006-attempt-2.json", "step-000000006-attempt-2.pt"} <= set(files(tmp_path))


def test_new_attempt_removes_partial_files_of_dead_attempt(tmp_path: Path) -> None:
    (tmp_path / ".step-000000007.pt.123.tmp").write_bytes(b"half")
    (tmp_path / "fence").mkdir()
    (tmp_path / "fence" / ".000000001.json.123.9.tmp").write_bytes(b"half")
    checkpointer(tmp_path, 2)
    assert files(tmp_path) == []
    assert [path.name for path in (tmp_path / "fence").iterdir()] == ["000000001.json"]
