"""What scripts import: the names, their weight, and their former paths."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import ddp_sdk
from tests.support import ROOT


def test_every_public_name_exists() -> None:
    assert {name: getattr(ddp_sdk, name).__name__ for name in ddp_sdk.__all__} == {
        name: name for name in ddp_sdk.__all__
    }


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'ddp_sdk' has no attribute 'Exportr'"):
        ddp_sdk.Exportr  # noqa: B018


def run_without_packages(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has no package but ours."""
    env = {"PYTHONPATH": str(ROOT / "trainer")}
    return subprocess.run([sys.executable, "-S", "-Werror", "-c", code], env=env, capture_output=True, text=True)


def test_import_without_torch_fails_only_where_tensors_are_needed() -> None:
    code = "from ddp_sdk import Exporter, RankEnv, UserError; print(Exporter(RankEnv()).page().decode())"
    done = run_without_packages(code)
    assert 'ddp_world_size{rank="0"} 1.0' in done.stdout, done.stderr
    done = run_without_packages("import ddp_sdk; print('imported'); ddp_sdk.MemoryCheckpoint")
    assert done.stdout == "imported\n"
    assert "No module named 'torch'" in done.stderr


def test_import_loads_no_other_module_of_ours() -> None:
    code = "import ddp_sdk, sys; print(sorted(name for name in sys.modules if name.startswith(('ddp_', 'torch'))))"
    assert run_without_packages(code).stdout == "['ddp_sdk']\n"


@pytest.mark.parametrize(("path", "name"), [("memory", "MemoryCheckpoint"), ("exporter", "Exporter")])
def test_former_path_works_with_a_warning_that_names_the_new_one(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"ddp_trainer.{path}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"from ddp_sdk import {name}") as warned:
        module = importlib.import_module(f"ddp_trainer.{path}")
    assert getattr(module, name) is getattr(ddp_sdk, name)
    assert len(warned) == 1


def test_warning_of_former_path_is_shown_for_the_line_of_the_script() -> None:
    """Python shows this category by default only if it belongs to the main module."""
    code = "from ddp_trainer.exporter import Exporter"
    env = {"PYTHONPATH": str(ROOT / "trainer")}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.startswith("<string>:1: DeprecationWarning: ddp_trainer.exporter is deprecated")
