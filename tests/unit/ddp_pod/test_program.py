"""The check that the user's program can be started, before PyTorch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_pod.contract.command_line import split_python_line
from ddp_pod.supervise.program import find_missing_program


@pytest.mark.parametrize(
    ("content", "mode", "message", "remedy"),
    [
        ("#!/bin/sh\n", 0o644, "is not executable (mode 0644)", "command: [bash, "),
        ("", 0o600, "is not executable (mode 0600)", "defaultMode: 0755"),
        ("#!/opt/conda/bin/bash\necho hi\n", 0o755, "the interpreter /opt/conda/bin/bash of", "first line"),
        ("#! /opt/nothing -e\n", 0o755, "the interpreter /opt/nothing of", "first line"),
        ("#!/usr/bin/env -S LANG=C no-such-python -u\n", 0o755, "the interpreter no-such-python of", "first line"),
        ("#!/opt/env python\n", 0o755, "the interpreter /opt/env of", "first line"),
        ("#!/bin/sh\r\necho hi\r\n", 0o755, "Windows line endings (CRLF), so its interpreter '/bin/sh'", "sed -i"),
        ("#!/usr/bin/env bash\r\n", 0o755, "Windows line endings", "eol=lf"),
        ("#!/bin/sh\n", 0o755, "", ""),
        ("#!/usr/bin/env sh\n", 0o755, "", ""),
        ("#!/bin/sh", 0o755, "", ""),
        ("#!\n", 0o755, "", ""),
        ("echo hi\n", 0o755, "", ""),
        ("", 0o755, "", ""),
    ],
)
def test_program_that_cannot_start_is_named_with_the_reason(
    content: str, mode: int, message: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.sh"
    path.write_text(content, newline="")
    path.chmod(mode)
    problem = find_missing_program(None, [str(path), "x"])
    if not message:
        assert problem is None
        return
    assert problem is not None
    assert message in problem.message
    assert str(path) in problem.message
    assert remedy in problem.remedy


def test_program_that_is_not_found_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").touch(mode=0o755)
    for name, message in (
        ("nothing", "program not found: nothing (looked in PATH)"),
        ("train.sh", "the one in the working directory is ./train.sh"),
        (str(tmp_path), "is a folder"),
    ):
        problem = find_missing_program(None, [name])
        assert problem is not None
        assert message in problem.message
        assert not problem.remedy


@pytest.mark.parametrize(
    ("words", "content", "is_refused"),
    [
        (["bash", "run.sh"], "set -e\r\npython train.py\r\n", True),
        (["sh", "-e", "run.sh", "config"], "python train.py\r\n", True),
        (["bash", "run.sh"], "set -e\npython train.py\r\n", False),
        (["bash", "run.sh"], "", False),
        (["bash", "-c", "run.sh"], "python train.py\r\n", False),
        (["cat", "run.sh"], "python train.py\r\n", False),
        (["bash", "nothing.sh"], "python train.py\r\n", False),
    ],
)
def test_shell_script_with_line_ends_of_windows_is_refused(
    words: list[str], content: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(content, newline="")
    problem = find_missing_program(None, words)
    assert (problem is not None and "run.sh has Windows line endings" in problem.message) is is_refused


def test_folder_without_a_main_module_is_refused(tmp_path: Path) -> None:
    line = split_python_line([str(tmp_path)])
    problem = find_missing_program(line, ())
    assert problem is not None
    assert "has no __main__.py" in problem.message
    (tmp_path / "__main__.py").touch()
    assert find_missing_program(line, ()) is None
