"""Generated .gitignore files select the same files here as in git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_cli.client.packing.files import Selection

_PIECES = ("a", "b", "ab", "*", "**", "?", "/", "[ab]", "[!a]", "!", "#", "\\", " ", "\t", "\r", "\f", ".")
_LINES = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)
_FILES = tuple(
    f"{folder}{name}" for folder in ("", "a/", "b/a/", "ab/b/") for name in ("a.b", "ab.a", "x y", "b!", "#")
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for name in _FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@given(lines=st.lists(_LINES, max_size=5), inner=_LINES, end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
def test_files_are_those_of_git(repository: Path, lines: list[str], inner: str, end: str, mark: bool) -> None:
    text = ("\ufeff" if mark else "") + end.join(lines)
    (repository / ".gitignore").write_bytes(text.encode())
    (repository / "a" / ".gitignore").write_bytes(inner.encode())
    words = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(words, cwd=repository, check=True, capture_output=True).stdout
    assert sorted(path for path, _ in Selection(repository).walk()) == sorted(os.fsdecode(listed).split("\0")[:-1])
