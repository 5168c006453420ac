"""The mirror of a checkpoint folder: when its files are complete, and which files it uploads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.contract.plan import CheckpointStoreConfig, encode_config
from ddp_pod.transfer.checkpoints import (
    NEWEST,
    MirrorConfig,
    MirrorEvent,
    MirrorRequest,
    MirrorState,
    decode_event,
)
from ddp_pod.transfer.mirror import CheckpointFolder, Mirror, find_step, list_written_files
from ddp_pod.transfer.snapshots import PrefixSuperseded
from tests.support.launcher_config import launcher_pod
from tests.support.mirror_clock import MirrorClock


class MirrorRun:
    """A mirror with the test's clock."""

    def __init__(self, root: Path, clock: MirrorClock, attempt: int = 1, keep: int = 3) -> None:
        self.clock = clock
        self.folder = root / f"ckpt-{attempt}"
        self.folder.mkdir(exist_ok=True)
        (root / "metrics").mkdir(exist_ok=True)
        pod = launcher_pod(root, checkpoint=CheckpointStoreConfig(f"file://{root}/store", keep))
        config = MirrorConfig(encode_config(pod), str(self.folder), attempt, f"job-{attempt}")
        self.events: list[MirrorEvent] = []
        self.mirror = Mirror(config, self.events.append)
        self.mirror._execute(MirrorRequest(1, claim=True, fetch=NEWEST))

    def scan(self, seconds: float = 0.0) -> bool:
        self.clock.now += seconds
        return self.mirror._advance(final=False)

    def flush(self) -> None:
        self.mirror._execute(MirrorRequest(2, flush=True))

    def saved(self) -> dict[str, Any]:
        """The newest manifest."""
        written = sorted((self.folder.parent / "store" / "snapshots").glob("*.json"))
        manifest: dict[str, Any] = json.loads(written[-1].read_text()) if written else {}
        return manifest

    @property
    def state(self) -> MirrorState:
        return next(event.state for event in reversed(self.events) if event.state is not None)


@pytest.fixture
def run(tmp_path: Path, mirror_clock: MirrorClock) -> MirrorRun:
    return MirrorRun(tmp_path, mirror_clock)


def test_file_is_uploaded_once_it_has_settled(run: MirrorRun) -> None:
    (run.folder / "step-12.pt").write_text("x")
    assert not run.scan()
    assert run.state.pending
    assert run.saved() == {}
    assert run.scan(3)
    assert run.saved()["step"] == 12
    assert (run.state.step, run.state.pending) == (12, False)


def test_unchanged_folder_writes_no_snapshot(run: MirrorRun) -> None:
    (run.folder / "a").write_text("x")
    run.scan()
    run.scan(3)
    before = run.saved()
    assert run.scan(100)
    (run.folder / "a").write_text("x")  # with the same content
    run.scan()
    run.scan(3)
    assert run.saved() == before


def test_open_file_delays_upload_for_a_limited_time(run: MirrorRun) -> None:
    with (run.folder / "log").open("w") as log:
        log.write("x")
        log.flush()
        (run.folder / "step-1.pt").write_text("x")
        run.scan()
        assert not run.scan(5)
        run.scan(40)
        assert list(run.saved()["files"]) == ["step-1.pt"]
        assert not run.state.pending
        (run.folder / "step-2.pt").write_text("x")
        run.scan()
        run.scan(3)
        assert sorted(run.saved()["files"]) == ["step-1.pt", "step-2.pt"]
    run.flush()
    assert "log" in run.saved()["files"]


def test_file_replaced_all_the_time_is_uploaded_now_and_then(run: MirrorRun) -> None:
    for step in range(40):
        (run.folder / "new.tmp").write_text(str(step))
        os.replace(run.folder / "new.tmp", run.folder / "last.pt")
        run.scan(1)
    assert list(run.saved()["files"]) == ["last.pt"]


def test_half_written_trainer_folder_is_left_out(run: MirrorRun) -> None:
    (run.folder / "checkpoint-5").mkdir()
    (run.folder / "checkpoint-5" / "model.safetensors").write_text("x")
    run.scan()
    assert not run.scan(10)
    (run.folder / "checkpoint-5" / "trainer_state.json").write_text("{}")
    run.scan()
    run.scan(3)
    assert run.saved()["step"] == 5
    assert len(run.saved()["files"]) == 2


def test_temporary_names_are_ignored(run: MirrorRun) -> None:
    (run.folder / ".step-1.pt.tmp").write_text("x")
    (run.folder / "a.tmp").write_text("x")
    (run.folder / "tmp-checkpoint-1").mkdir()
    (run.folder / "tmp-checkpoint-1" / "a").write_text("x")
    run.flush()
    assert run.saved() == {}


def test_reported_step_becomes_step_of_snapshot(run: MirrorRun, tmp_path: Path) -> None:
    page = '# TYPE ddp_checkpoint_step gauge\nddp_checkpoint_step{rank="0"} 77\n'
    (tmp_path / "metrics" / "0.prom").write_text(page)
    (run.folder / "last.pt").write_text("x")
    run.scan()
    run.scan(3)
    assert run.saved()["step"] == 77


def test_failing_store_is_reported_and_retried(run: MirrorRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder / "a").write_text("x")
    run.scan()
    with monkeypatch.context() as broken:
        broken.setattr(run.mirror._store, "upload", lambda *_: (_ for _ in ()).throw(OSError("503 Slow Down")))
        assert not run.scan(3)
        assert "503 Slow Down" in run.state.problem
        assert run.state.failures == 1
    assert not run.scan()  # too early
    assert run.scan(31)
    assert run.state.problem == ""
    assert run.saved()["files"]


def test_superseded_attempt_ends(run: MirrorRun, tmp_path: Path, mirror_clock: MirrorClock) -> None:
    MirrorRun(tmp_path, mirror_clock, attempt=2)
    (run.folder / "a").write_text("x")
    run.scan()
    with pytest.raises(PrefixSuperseded):
        run.scan(3)


def test_next_attempt_restores_uploaded_files(run: MirrorRun, tmp_path: Path, mirror_clock: MirrorClock) -> None:
    (run.folder / "sub").mkdir()
    (run.folder / "sub" / "step-3.pt").write_text("x")
    run.flush()
    second = MirrorRun(tmp_path, mirror_clock, attempt=2)
    assert (second.folder / "sub" / "step-3.pt").read_text() == "x"
    assert second.state.step == 3
    before = second.saved()
    second.flush()
    assert second.saved() == before
    assert second.events[-1] == MirrorEvent(done="000000001-000000001", number=2)


def test_older_snapshot_is_kept_until_newest_is_intact(
    run: MirrorRun, tmp_path: Path, mirror_clock: MirrorClock
) -> None:
    for step in (1, 2):
        (run.folder / "step.pt").write_text(f"state {step}")
        run.flush()
    ((digest, _),) = run.saved()["files"].values()
    (tmp_path / "store" / "objects" / digest).write_text("damaged")
    second = MirrorRun(tmp_path, mirror_clock, attempt=2, keep=1)
    assert (second.folder / "step.pt").read_text() == "state 1"
    (second.folder / "step.pt").write_text("state 3")
    second.flush()
    assert len(list((tmp_path / "store" / "objects").iterdir())) == 1


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("step-000000500-attempt-2.pt", 500),
        ("checkpoint-40/model.safetensors", 40),
        ("epoch=1-step=90.ckpt", 90),
        ("global_step7/mp_rank_00.pt", 7),
        ("last.pt", None),
        ("epoch-3.pt", None),
        ("footstep-9.txt", None),
    ],
)
def test_step_is_found_in_names(path: str, step: int | None) -> None:
    assert find_step([path]) == step


def test_only_files_open_for_writing_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("w"):
        assert path.stat().st_ino in list_written_files()
    with path.open():
        assert path.stat().st_ino not in list_written_files()


def test_removed_file_is_not_scanned(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path))
    (tmp_path / "a").write_text("x")
    assert list(folder.scan(0)) == ["a"]
    (tmp_path / "a").unlink()
    assert folder.scan(1) == {}


@pytest.mark.parametrize(
    "event", [MirrorEvent(done="", number=3), MirrorEvent(state=MirrorState(step=1, time=2.0)), MirrorEvent(end="E")]
)
def test_event_survives_json(event: MirrorEvent) -> None:
    assert decode_event(event.encode()) == event
