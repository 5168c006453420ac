from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_sdk.errors import UserError
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.checkpoint import CheckpointConfig
from ddp_trainer.checkpoint.store import Checkpointer, StateSnapshot, load_newest
from ddp_trainer.distributed.world import World

WORLD = World(RankEnv(), torch.device("cpu"))


def checkpointer(folder: Path, keep: int = 3) -> Checkpointer:
    store = Checkpointer(CheckpointConfig(dir=str(folder), keep=keep))
    store.prepare()
    return store


def save(one: Checkpointer, step: int, accuracy: float | None = None, **values: Any) -> None:
    one.save({"weights": torch.full((3,), float(step)), **values}, step, accuracy, {})
    one.wait()


def newest(one: Checkpointer) -> dict[str, Any]:
    state = load_newest(one, WORLD)
    assert state is not None
    return state


def test_saved_state_is_restored(tmp_path: Path) -> None:
    store = checkpointer(tmp_path)
    assert load_newest(store, WORLD) is None
    assert load_newest(None, WORLD) is None
    state = {"nested": [torch.arange(4), {"x": torch.tensor(1.5, dtype=torch.bfloat16)}], "lr": 0.1, "none": None}
    save(store, 5, **state)
    loaded = newest(store)
    assert torch.equal(loaded["nested"][0], torch.arange(4))
    assert loaded["nested"][1]["x"].dtype == torch.bfloat16
    assert loaded["lr"] == 0.1
    assert loaded["none"] is None
    (tmp_path / "step-000000009.pt").write_bytes((tmp_path / "step-000000005.pt").read_bytes())
    assert [saved.step for saved in store.list()] == [5]  # a data file without a manifest is none


def test_both_files_are_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = checkpointer(tmp_path)
    synced = set[str]()
    named = list[str]()
    sync = os.fsync
    rename = os.replace

    def note_sync(descriptor: int) -> None:
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        assert os.path.realpath(source) in synced, f"{target} may be empty after a power failure"
        named.append(target.suffix)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    save(store, 1)
    assert named == [".pt", ".json"]
    assert os.path.realpath(tmp_path) in synced


def test_data_file_is_plain_torch_file_and_manifest_plain_json(tmp_path: Path) -> None:
    save(checkpointer(tmp_path), 12, 0.5)
    assert torch.load(tmp_path / "step-000000012.pt", weights_only=True)["weights"].tolist() == [12.0] * 3
    manifest = json.loads((tmp_path / "step-000000012.json").read_text())
    assert manifest["step"] == 12
    assert manifest["accuracy"] == 0.5
    assert manifest["bytes"] == (tmp_path / "step-000000012.pt").stat().st_size


class Poison:
    """An object that creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_code_in_checkpoint_with_valid_checksum_is_not_run(tmp_path: Path) -> None:
    store = checkpointer(tmp_path / "saved")
    save(store, 1)
    (saved,) = store.list()
    torch.save({"weights": Poison(tmp_path / "pwned")}, saved.data)
    content = saved.data.read_bytes()
    manifest = json.loads(saved.manifest.read_text())
    manifest |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    saved.manifest.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"was not saved by this trainer \(Weights only load failed"):
        newest(store)
    assert not (tmp_path / "pwned").exists()
    torch.load(saved.data, weights_only=False)  # unpickling would have created it
    assert (tmp_path / "pwned").exists()


def test_manifest_names_no_file_outside_of_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = checkpointer(tmp_path / "saved", keep=1)
    save(store, 1)
    (saved,) = store.list()
    peers = tmp_path / "others.pt"
    peers.write_bytes(saved.data.read_bytes())
    for name in ("../others.pt", str(peers), "..", ""):
        saved.manifest.write_text(json.dumps(json.loads(saved.manifest.read_text()) | {"file": name}))
        assert store.list() == []
        assert "it names the file" in capsys.readouterr().err
    save(store, 2)
    save(store, 3)
    assert peers.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "garbage"])
def test_damaged_checkpoint_is_skipped_with_warning(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = checkpointer(tmp_path)
    save(store, 1)
    save(store, 2)
    path = tmp_path / "step-000000002.pt"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-10])
    elif damage == "remove":
        path.unlink()
    else:
        (tmp_path / "step-000000002.json").write_text("{")
    assert newest(store)["weights"].tolist() == [1.0] * 3
    message = capsys.readouterr().err
    assert "step-000000002" in message
    if damage == "remove":
        assert "can't be read (No such file or directory); trying an older one" in message


def test_folder_without_valid_checkpoint_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = checkpointer(tmp_path)
    assert store.read_newest() is None
    assert capsys.readouterr().err == ""
    save(store, 1)
    (tmp_path / "step-000000001.pt").write_bytes(b"")
    assert store.read_newest() is None
    assert f"no checkpoint in {tmp_path} is valid; training starts from the beginning" in capsys.readouterr().err


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    store = checkpointer(tmp_path, keep=2)
    for step, accuracy in enumerate([0.5, 0.9, 0.7, None, 0.8, 0.6], start=1):
        save(store, step, accuracy)
    assert [saved.step for saved in store.list()] == [6, 5, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{step:09d}.{kind}" for step in (2, 5, 6) for kind in ("json", "pt")
    ]


def test_failed_write_is_warning_and_keeps_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = checkpointer(tmp_path)
    save(store, 1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    save(store, 2)
    assert "checkpoint of step 2 was not saved" in capsys.readouterr().err
    assert newest(store)["weights"].tolist() == [1.0] * 3
    assert not list(tmp_path.glob(".*"))
    monkeypatch.undo()
    save(store, 3, x=lambda: None)
    assert "checkpoint of step 3 was not saved" in capsys.readouterr().err
    save(store, 4)
    assert [saved.step for saved in store.list()] == [4, 1]


def test_folder_that_cant_be_written_is_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"checkpoint.dir: cannot write to .*/file/sub: "):
        checkpointer(tmp_path / "file" / "sub")


class StandingDisk:
    """A stand-in for a slow file system: fsync returns only after ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.waited_for = False
        sync = os.fsync

        def stand(descriptor: int) -> None:
            self.reached.set()
            if not self.go.wait(10.0):
                self.waited_for = True
                self.go.set()
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", stand)


def test_save_returns_while_disk_blocks_and_newest_waiting_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = checkpointer(tmp_path)
    disk = StandingDisk(monkeypatch)
    weights = torch.zeros(3)
    for step in (1, 2, 3, 4):
        weights.fill_(step)
        store.save({"weights": weights}, step, None, {})
        assert disk.reached.wait(30.0)
    weights.fill_(99)
    assert store.list() == []
    assert not disk.waited_for
    disk.go.set()
    store.wait()
    assert [saved.step for saved in store.list()] == [4, 1]
    assert newest(store)["weights"].tolist() == [4.0] * 3
    message = capsys.readouterr().err
    assert "checkpoint of step 2 is skipped: checkpoints are due faster" in message
    assert "checkpoint of step 3 is skipped" in message
    assert "step 4" not in message


def small_free(folder: Path) -> int:
    numbers = os.statvfs(folder)
    return numbers.f_bavail * numbers.f_frsize


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}; a raising stand-in is tested")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_keeps_old_checkpoint_and_leaves_no_partial_file(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = checkpointer(small_disk / "checkpoints", keep=1)
    save(store, 1, x=torch.zeros(150_000))
    for step in (2, 3):
        save(store, step, x=torch.zeros(150_000))
    message = capfd.readouterr().err
    assert message.splitlines() == [line for line in message.splitlines() if line.startswith("ddp_trainer: warning: ")]
    assert "checkpoint of step 2 was not saved" in message
    assert "No space left" in message
    assert newest(store)["weights"].tolist() == [1.0] * 3
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-000000001.json", "step-000000001.pt"]
    # Full when the data is written and only the manifest is left.
    (small_disk / "filler").write_bytes(bytes(small_free(small_disk) - os.sysconf("SC_PAGESIZE")))
    save(store, 5)
    assert "checkpoint of step 5 was not saved ([Errno 28] No space left" in capfd.readouterr().err
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-000000001.json", "step-000000001.pt"]
    # After space is freed the next checkpoint is saved.
    (small_disk / "filler").unlink()
    save(store, 4)
    assert newest(store)["weights"].tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("run", "seconds"),
    [({"trainingSeconds": 12.5}, 12.5), ({}, 0.0), ([], 0.0), ({"trainingSeconds": "x"}, 0.0),
     ({"trainingSeconds": math.nan}, 0.0), ({"trainingSeconds": -1}, 0.0)],
)  # fmt: skip
def test_valid_training_time_is_read_from_manifest(tmp_path: Path, run: Any, seconds: float) -> None:
    store = checkpointer(tmp_path)
    store.save({}, 1, None, run)
    store.wait()
    assert newest(store) == {}
    assert store.resumed is not None
    assert store.resumed.seconds == seconds


def test_one_stream_device_copies_all_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[torch.device] = []

    class FakeCudaStream:
        def __init__(self, device: torch.device) -> None:
            created.append(device)

        def synchronize(self) -> None:
            pass

    class FakeCudaEvent:
        def wait(self, stream: FakeCudaStream) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", FakeCudaStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    streams: dict[torch.device, Any] = {}
    first = torch.device("cuda", 0)
    second = torch.device("cuda", 1)
    for device in (first, second, first, second):
        snapshot = StateSnapshot({})
        snapshot._copied = [(device, FakeCudaEvent())]
        snapshot.to_cpu(streams)
    assert created == [first, second]
