"""The environment of a run: recorded and omitted values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.local.machine import ENV_PYTHON, describe_environment, find_interpreter, has_torch
from ddp_operator import __version__
from tests.support.builders import resource


def test_library_variables_are_reported_without_secrets(tmp_path: Path) -> None:
    item: dict[str, Any] = resource()
    item["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "NCCL_DEBUG", "value": "INFO"}]
    environ = {
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "2",
        "HF_TOKEN": "s3cret",
        "TORCH_API_KEY": "s3cret",
        "HOME": "/",
    }
    facts = describe_environment(item, tmp_path, environ)
    assert facts["variables"] == "NCCL_DEBUG=INFO OMP_NUM_THREADS=2"
    assert facts["versions"].startswith(f"ddp {__version__}, Python 3.")
    assert facts["directory"] == str(tmp_path)
    assert "s3cret" not in str(facts)


def write_interpreter(path: Path, exit_code: int = 1) -> Path:
    """Write a program that finds no module, whatever it is asked; with the exit code 0 it finds all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    path.chmod(0o755)
    return path


def test_interpreter_of_another_environment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_interpreter(tmp_path / "bin" / "python3.12")
    monkeypatch.chdir(tmp_path)
    assert find_interpreter(str(own), {}) == str(own)
    assert find_interpreter("bin/python3.12", {}) == str(own)
    assert not has_torch(str(own))

    item: dict[str, Any] = resource()
    item["spec"]["template"]["spec"]["containers"][0]["command"] = [str(own), "train.py"]
    assert describe_environment(item, tmp_path, {})["versions"] == f"ddp {__version__}, {own}"


@pytest.mark.parametrize("word", ["python", "python3.12", "/opt/of-the-image/bin/python", "."])
def test_interpreter_of_image_is_that_of_this_process(word: str) -> None:
    assert find_interpreter(word, {}) == sys.executable


def test_interpreter_of_active_environment_with_torch_is_chosen(tmp_path: Path) -> None:
    with_torch = write_interpreter(tmp_path / "conda" / "bin" / "python", exit_code=0)
    write_interpreter(tmp_path / "empty" / "bin" / "python")
    conda = str(tmp_path / "conda")
    assert find_interpreter("python", {"CONDA_PREFIX": conda}) == str(with_torch)
    assert find_interpreter("python", {"VIRTUAL_ENV": conda}) == str(with_torch)
    assert find_interpreter("python", {"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": conda}) == sys.executable
    assert find_interpreter("python", {"VIRTUAL_ENV": str(tmp_path / "empty"), "CONDA_PREFIX": conda}) == str(
        with_torch
    )
    assert find_interpreter("python", {"VIRTUAL_ENV": str(tmp_path / "missing")}) == sys.executable
    assert find_interpreter("python", {"VIRTUAL_ENV": conda, ENV_PYTHON: "/usr/bin/python3"}) == "/usr/bin/python3"
