"""What earlier trainings have left in the user's folder."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from ddp_cli.features.check.outputs import find_outputs, is_checkpoint


def write_checkpoint(path: Path, age: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"weights")
    os.utime(path, (2000.0 - age, 2000.0 - age))


def write_text(path: Path, time: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text")
    os.utime(path, (time, time))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two trainings, data and a source, and pretrained weights that are older than it."""
    write_text(tmp_path / "train.py", 1000.0)
    write_text(tmp_path / "data/train.bin", 2000.0)
    write_checkpoint(tmp_path / "pretrained.pt", age=1500.0)
    write_checkpoint(tmp_path / "out/checkpoint-5/model.pt", age=10.0)
    write_checkpoint(tmp_path / "out/checkpoint-10/model.pt", age=5.0)
    write_text(tmp_path / "out/checkpoint-10/state.json", 1995.0)
    write_checkpoint(tmp_path / "last.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("opened", "outputs"),
    [
        ([], ["last.pt", "out"]),
        (["data/train.bin", "out/checkpoint-10/state.json"], ["out", "last.pt"]),
        (["last.pt"], ["last.pt", "out"]),
    ],
    ids=["nothing read", "state read", "file read"],
)
def test_outputs_are_newer_than_the_sources_and_have_checkpoints(
    folder: Path, opened: list[str], outputs: list[str]
) -> None:
    assert find_outputs(folder, opened) == outputs


def test_outputs_are_not_tracked_by_git(folder: Path) -> None:
    for words in (["init", "-q"], ["add", "train.py", "pretrained.pt", "out/checkpoint-5"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, "commit", "-qm", "a"], cwd=folder, check=True)
    os.utime(folder / "train.py", (3000.0, 3000.0))

    assert find_outputs(folder, []) == ["last.pt", "out/checkpoint-10"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x80\x02}q\x00.", True),
        ((20).to_bytes(8, "little") + b'{"a": 1}' + b" " * 30, True),
        (b"PK\x03\x04 broken", False),
        (b"", False),
        (b'{"step": 1}', False),
        (b"\x89PNG\r\n\x1a\n0", False),
    ],
    ids=["pickle", "safetensors", "broken archive", "empty", "JSON", "picture"],
)
def test_checkpoint_is_known_by_its_content(tmp_path: Path, content: bytes, expected: bool) -> None:
    (tmp_path / "file").write_bytes(content)
    assert is_checkpoint(tmp_path / "file") is expected
