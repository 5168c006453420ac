"""The state of a repository, without running the programs of its configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddp_cli.local.git import ask_git

STATUS = ("status", "--porcelain", "--ignore-submodules", "--", ".")
LOG = ("log", "-1", "--format=%h %s")


def git(folder: Path, *words: str) -> str:
    line = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=b", *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(params=["sha1", "sha256", "worktree"])
def repository(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A repository with one commit."""
    folder = tmp_path / "code"
    folder.mkdir()
    object_format = "sha256" if request.param == "sha256" else "sha1"
    git(folder, "init", "-q", f"--object-format={object_format}")
    (folder / "train.py").write_text("1")
    (folder / ".gitattributes").write_text("*.py filter=planted diff=planted\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    if request.param == "worktree":
        git(folder, "worktree", "add", "-q", str(tmp_path / "other"))
        return tmp_path / "other"
    return folder


def test_commit_and_changes_are_read(repository: Path) -> None:
    assert ask_git(repository, "rev-parse") == git(repository, "rev-parse", "HEAD")
    assert ask_git(repository, *LOG).endswith(" first")
    assert ask_git(repository, *STATUS) == ""
    (repository / "train.py").write_text("2")
    assert ask_git(repository, *STATUS) == "M train.py"
    (repository / "package").mkdir()
    (repository / "package" / "new.py").write_text("")
    assert ask_git(repository / "package", *STATUS) == "?? package/"


def test_programs_of_the_configuration_do_not_run(repository: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 >> {started}\ncat\n")
    program.chmod(0o755)
    for name in ("core.fsmonitor", "filter.planted.clean", "filter.planted.process", "diff.planted.command"):
        git(repository, "config", name, str(program))
    for name, value in (("gpg.program", str(program)), ("log.showSignature", "true"), ("core.pager", str(program))):
        git(repository, "config", name, value)
    (repository / "train.py").write_text("3")
    started.unlink(missing_ok=True)
    assert ask_git(repository, *STATUS) == "M train.py"
    assert ask_git(repository, *LOG).endswith(" first")
    assert not started.exists()
