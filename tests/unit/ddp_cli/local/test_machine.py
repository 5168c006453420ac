"""The environment of a run: recorded and omitted values."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.local.machine import ENV_PYTHON, _choose_with_torch, describe_environment, find_interpreter, has_torch
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


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ddp` in an environment of its own, as pipx makes it."""
    monkeypatch.setattr("ddp_cli.local.machine.importlib.util.find_spec", lambda name: None)
    _choose_with_torch.cache_clear()
    monkeypatch.setattr("ddp_cli.local.machine._choose_with_torch", _choose_with_torch.__wrapped__)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("place", "folder", "environ"),
    [
        (".venv/bin/python", ".", {}),
        (".venv/bin/python", "src/deep", {}),
        ("pyenv/bin/python", ".", {"PATH": "pyenv/bin"}),
        ("tools/python3", "src", {"PATH": "missing:../empty/bin:../tools"}),
        ("venv/bin/python", "src", {"VIRTUAL_ENV": "../venv"}),
    ],
)
def test_first_interpreter_with_torch_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, folder: str, environ: dict[str, str]
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "src" / "deep").mkdir(parents=True)
    write_interpreter(tmp_path / "empty" / "bin" / "python")
    write_interpreter(tmp_path / "src" / ".venv" / "bin" / "python")
    expected = write_interpreter(tmp_path / place, exit_code=0)
    monkeypatch.chdir(tmp_path / folder)
    assert os.path.samefile(find_interpreter("python", environ), expected)
    monkeypatch.chdir(tmp_path.parent)
    assert find_interpreter("python", {}) == sys.executable


@pytest.mark.usefixtures("without_torch")
def test_interpreter_that_shim_starts_in_this_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = write_interpreter(tmp_path / "bin" / "python")
    shim.write_text("#!/bin/sh\n[ -e .python-version ] && echo /versions/3.12/bin/python\n")
    monkeypatch.chdir(tmp_path)
    assert find_interpreter("python", {"PATH": "bin"}) == sys.executable
    (tmp_path / ".python-version").touch()
    assert find_interpreter("python", {"PATH": "bin"}) == "/versions/3.12/bin/python"
