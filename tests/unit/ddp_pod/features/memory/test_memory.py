"""The launcher's side of copies in memory, with files that the trainer's package writes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ddp_operator.manifests.children import load_launcher
from ddp_pod.base import files
from ddp_pod.features.memory import copies as memory
from ddp_pod.features.memory.copies import (
    find_memory_folder,
    list_copies,
    remove_memory,
    save_copies,
    summarize_copies,
    wait_for_copies,
)
from ddp_sdk.memory.copies import HEADER_BYTES, REPLICATED, SHARD, CopyFile, build_header
from tests.support import ROOT

CONTENT = torch.arange(256).to(torch.uint8)


def write(path: Path, step: int, *, kind: int = REPLICATED, rank: int = 0) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = CopyFile(str(path))
    reserved = file.reserve(CONTENT.numel())
    reserved.copy_(CONTENT)
    header = build_header(kind, step, world=2, rank=rank, payload=128, memory=reserved)
    file.commit(header._replace(saves=step, stalled=0.25 * step))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {
        "DDP_MEMORY_DIR": str(tmp_path / "memory"),
        "DDP_CHECKPOINT_DIR": str(tmp_path / "ckpt"),
        "DDP_RUN_ID": "uid-of-the-job-2",
        "DDP_ATTEMPT": "2",
    }


def save(env: dict[str, str], *, checkpoint_step: float = -1.0, deadline: float = math.inf) -> None:
    save_copies(1, env, checkpoint_step=checkpoint_step, deadline=deadline)


def list_saved(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "ckpt" / "ddp-memory-uid-of-the-job").glob("*"))


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o777])
def test_copies_are_read_from_own_private_folder_only(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "pod-0"
    write(folder / "state-0", 7)
    folder.chmod(mode)
    link = tmp_path / "pod-1"
    link.symlink_to(folder)
    assert [copy.step for copy in list_copies(str(folder))] == ([7] if mode == 0o700 else [])
    assert list_copies(str(link)) == []


def test_planted_links_and_pipes_are_no_copies(tmp_path: Path) -> None:
    write(tmp_path / "secret", 9)
    (tmp_path / "pod-0").mkdir(mode=0o700)
    (tmp_path / "pod-0" / "peer-0-0").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pod-0" / "peer-0-1")
    assert list_copies(str(tmp_path / "pod-0")) == []
    wait_for_copies(0, {"DDP_MEMORY_DIR": str(tmp_path)})  # does not wait for a writer of the pipe


def test_planted_link_in_the_checkpoint_folder_is_not_followed(env: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "memory" / "pod-1" / "state-0", 7)
    write(tmp_path / "other" / "state-1", 1)
    saved = tmp_path / "ckpt" / "ddp-memory-uid-of-the-job"
    saved.parent.mkdir()
    saved.symlink_to(tmp_path / "other")
    save(env)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["state-1"]

    saved.unlink()
    saved.mkdir()
    (saved / "state-7").symlink_to(tmp_path / "other" / "state-1")
    save(env)
    assert [copy.step for copy in list_copies(str(tmp_path / "other"))] == [1]
    assert not (saved / "state-7").is_symlink()


def test_header_of_the_trainer_is_read(tmp_path: Path) -> None:
    write(tmp_path / "shard-1-0", 7, kind=SHARD, rank=3)
    [copy] = list_copies(str(tmp_path))
    assert (copy.kind, copy.step, copy.world, copy.rank) == (SHARD, 7, 2, 3)
    assert (copy.size, copy.saves, copy.stalled) == (HEADER_BYTES + 256, 7, 1.75)
    assert memory.HEADER_BYTES == HEADER_BYTES


def test_incomplete_files_are_no_copies(tmp_path: Path) -> None:
    write(tmp_path / "state-0", 7)
    CopyFile(str(tmp_path / "state-0")).reserve(256)
    (tmp_path / "state-1").write_bytes(b"DDPMEM01")
    assert list_copies(str(tmp_path)) == []
    assert summarize_copies(str(tmp_path / "missing")) is None


def test_page_shows_the_newest_own_copy(tmp_path: Path) -> None:
    write(tmp_path / "state-0", 7)
    write(tmp_path / "state-1", 8)
    write(tmp_path / "peer-0-0", 9)
    copies = summarize_copies(str(tmp_path))
    assert copies is not None
    assert (copies.step, copies.saves, copies.stalled_seconds) == (8, 8, 2.0)
    assert copies.bytes == 3 * (HEADER_BYTES + 256)


def test_newest_copies_are_saved_once(env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "pod-1"
    write(folder / "state-0", 7)
    write(folder / "state-1", 8)
    save(env)
    assert list_saved(tmp_path) == ["state-8"]
    write(folder / "state-0", 9)
    save(env)
    save(env)
    assert list_saved(tmp_path) == ["state-9"]
    assert CopyFile(str(tmp_path / "ckpt" / "ddp-memory-uid-of-the-job" / "state-9")).verify()


def test_shards_of_the_neighbour_are_saved_too(env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "pod-1"
    write(folder / "shard-0-0", 7, kind=SHARD, rank=1)
    write(folder / "shard-0-1", 8, kind=SHARD, rank=1)
    write(folder / "peer-0-0", 7, kind=SHARD, rank=0)
    save(env)
    assert list_saved(tmp_path) == ["shard-0-7", "shard-1-7", "shard-1-8"]
    write(folder / "shard-0-0", 9, kind=SHARD, rank=1)
    save(env)
    assert list_saved(tmp_path) == ["shard-0-7", "shard-1-8", "shard-1-9"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"checkpoint_step": 7.0}, ""),  # the checkpoint is as new
        ({"deadline": -math.inf}, "the grace period is over; raise spec.checkpoint.graceSeconds"),
        ({}, ""),  # without a checkpoint folder
    ],
)
def test_copy_is_not_saved_without_need_time_or_place(
    env: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], options: dict[str, float], problem: str
) -> None:
    write(tmp_path / "memory" / "pod-1" / "state-0", 7)
    if not options:
        del env["DDP_CHECKPOINT_DIR"]
    save(env, **options)
    assert list_saved(tmp_path) == []
    assert problem in capfd.readouterr().err


def test_files_of_killed_launchers_are_removed(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(descriptor: int) -> None:
        raise KeyboardInterrupt

    write(tmp_path / "memory" / "pod-1" / "state-0", 7)
    with monkeypatch.context() as patched:
        patched.setattr(memory.os, "fsync", kill)
        patched.setattr(memory.os.path, "exists", lambda path: False)  # a killed process removes nothing
        with pytest.raises(KeyboardInterrupt):
            save(env)
    assert len(list_saved(tmp_path)) == 1
    of_peer = tmp_path / "ckpt" / "ddp-memory-uid-of-the-job" / "state-8.pod-2.tmp"
    of_peer.touch()
    write(tmp_path / "memory" / "pod-1" / "state-0", 8)
    save(env)
    assert list_saved(tmp_path) == ["state-8", of_peer.name]


def begin_copy(env: dict[str, str]) -> CopyFile:
    folder = Path(env["DDP_MEMORY_DIR"], "pod-1")
    folder.mkdir(mode=0o700, parents=True)
    file = CopyFile(str(folder / "state-0"))
    file.reserve(CONTENT.numel()).copy_(CONTENT)
    file.announce()
    return file


def test_copy_under_way_is_completed_before_the_ranks_end(env: dict[str, str]) -> None:
    file = begin_copy(env)
    with ThreadPoolExecutor() as pool:
        wait = pool.submit(wait_for_copies, 1, env, math.inf)
        with pytest.raises(TimeoutError):
            wait.result(timeout=0.2)
        file.commit(build_header(REPLICATED, 3, world=2, rank=0, payload=128, memory=CONTENT))
        wait.result(timeout=60)


def test_wait_for_copies_ends(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_copies(1, {}, math.inf)
    wait_for_copies(1, env, math.inf)  # without copies
    begin_copy(env)
    wait_for_copies(1, env, 0.01)
    monkeypatch.setattr(memory, "process_state", lambda pid: "")
    wait_for_copies(1, env, math.inf)  # of killed ranks
    assert list_copies(str(find_memory_folder(1, env))) == []


def test_memory_of_this_pod_only_is_removed(env: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "memory" / "pod-1" / "state-0", 7)
    write(tmp_path / "memory" / "pod-2" / "state-0", 7)
    save(env)
    remove_memory(1, env, succeeded=False)
    assert find_memory_folder(1, env) == str(tmp_path / "memory" / "pod-1")
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["pod-2"]
    assert list_saved(tmp_path) == ["state-7"]
    remove_memory(0, env, succeeded=True)
    assert list_saved(tmp_path) == []


def extract_delivered(folder: Path) -> Path:
    """Let a launcher without site-packages extract the archive; returns the folder in PYTHONPATH."""
    archive = folder / "launcher.zip"
    archive.write_bytes(load_launcher().archive)
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "operator")!r})
from ddp_pod.base import files
files.ARCHIVE = {str(archive)!r}
files.add_delivered_packages({str(folder)!r})
"""
    subprocess.run([sys.executable, "-E", "-S", "-c", code], check=True)
    return folder / "python"


# ``-W error``: no script may get a warning that it cannot change. The former path warns.
@pytest.mark.parametrize(("options", "module"), [(["-Werror"], "ddp_sdk"), ([], "ddp_trainer.exporter")])
def test_delivered_exporter_needs_only_the_standard_library(tmp_path: Path, options: list[str], module: str) -> None:
    folder = extract_delivered(tmp_path)
    script = f"""
from {module} import Exporter
exporter = Exporter.start(total_steps=2)
exporter.step(samples=7, loss=0.5)
exporter.close()
"""
    # Without site-packages, that is without torch, prometheus-client and the trainer.
    env = {"PYTHONPATH": str(folder), "DDP_RUNTIME_DIR": str(tmp_path), "RANK": "0", "WORLD_SIZE": "1"}
    (tmp_path / "metrics").mkdir()
    done = subprocess.run([sys.executable, "-S", *options, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'ddp_samples_total{rank="0"} 7.0' in (tmp_path / "metrics" / "0.prom").read_text()


def test_delivered_packages_are_found_by_later_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "launcher.zip"
    names = ["ddp_sdk/__init__.py", "ddp_sdk/memory/copies.py", "ddp_trainer/memory.py"]
    with zipfile.ZipFile(launcher, "w") as archive:
        for name in [*names, "supervise/main.py"]:
            archive.writestr(name, "")
    monkeypatch.setattr(files, "ARCHIVE", str(launcher))
    monkeypatch.setattr(files.importlib.util, "find_spec", {}.get)  # the image has no package of ours
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    files.add_delivered_packages(str(tmp_path / "runtime"))
    root = tmp_path / "runtime" / "python"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.py")) == names
    assert files.os.environ["PYTHONPATH"] == f"/users/own:{root}"


def test_packages_of_image_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ARCHIVE", str(tmp_path / "launcher.zip"))  # which is not opened
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    files.add_delivered_packages(str(tmp_path / "runtime"))
    assert files.os.environ["PYTHONPATH"] == "/users/own"
    assert not (tmp_path / "runtime").exists()
