"""The copy of the user's folder for a run of `ddp check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_cli.client.errors import ClientError
from ddp_cli.features.check.copying import copy_folder


def write(folder: Path, *paths: str, size: int = 1) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x" * size)


def list_copy(folder: Path, target: Path) -> set[str]:
    copy_folder(folder, target)
    return {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("path", "copied"),
    [
        ("train.py", True),
        ("data/train.bin", True),  # git ignores it
        (".env", True),  # a secret stays on this machine
        ("large/part.bin", False),  # .ddpignore names it
        (".git/HEAD", False),
        ("__pycache__/train.pyc", False),
        ("environment/pyvenv.cfg", False),
        ("environment/lib/torch.py", False),
        ("ddp-runs/train-1/status.yaml", False),
        ("runs/train-1/logs/attempt-1-pod-0.log", False),
    ],
)
def test_file_is_copied_unless_no_run_needs_it(tmp_path: Path, path: str, copied: bool) -> None:
    folder = tmp_path / "project"
    write(folder, path, "environment/pyvenv.cfg")
    write(folder / "runs/train-1", "job.yaml", "objects.yaml", "command.txt")
    (folder / ".gitignore").write_text("data/\n")
    (folder / ".ddpignore").write_text("large/\n")
    assert (path in list_copy(folder, tmp_path / "copy")) is copied


def test_empty_folder_is_copied(tmp_path: Path) -> None:
    (tmp_path / "project/checkpoints").mkdir(parents=True)
    copy_folder(tmp_path / "project", tmp_path / "copy")
    assert (tmp_path / "copy/checkpoints").is_dir()


def test_no_path_of_the_copy_leads_to_the_users_files(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    write(folder, "code/model.py")
    write(tmp_path, "outside/data.bin", "last.pt")
    for name, target in {
        "data": tmp_path / "outside",
        "last.pt": tmp_path / "last.pt",
        "code/again": folder,
        "model.py": Path("code/model.py"),
        "missing": tmp_path / "missing",
    }.items():
        (folder / name).symlink_to(target)
    (folder / "code/model.py").chmod(0o444)

    assert list_copy(folder, tmp_path / "copy") == {"code/model.py", "model.py", "data/data.bin", "last.pt"}
    for path in (tmp_path / "copy").rglob("*"):
        assert not path.is_symlink()
        if path.is_file():
            path.write_text("changed")
    unchanged = (folder / "code/model.py", tmp_path / "outside/data.bin", tmp_path / "last.pt")
    assert [path.read_text() for path in unchanged] == ["x", "x", "x"]


def test_large_folder_is_refused_with_its_largest_entries(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    write(folder, "data/a", "data/b", size=600)
    write(folder, "train.py", size=10)
    with pytest.raises(ClientError, match=r"Largest entries so far: data \(1 KiB\).*\.ddpignore.*absolute path"):
        copy_folder(folder, tmp_path / "copy", most=1000)
    copy_folder(folder, tmp_path / "copy2", most=1210)


def test_copy_below_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="TMPDIR"):
        copy_folder(tmp_path, tmp_path / "temporary/copy")
