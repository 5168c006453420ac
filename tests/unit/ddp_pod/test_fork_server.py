"""Which programs may run in a forked process instead of a fresh interpreter. The process tier forks."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_pod.torchrun.fork_server import (
    find_obstacle,
    find_obstacle_in_server,
    unfreeze_for_leak_reports,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    cuda = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return tmp_path


def test_threads_or_gpu_use_in_server_is_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_obstacle_in_server(threads=1) is None
    assert "has left 2 threads" in (find_obstacle_in_server(threads=2) or "")
    monkeypatch.setattr(sys.modules["torch"].cuda, "is_initialized", lambda: True)
    assert "has initialized the GPU" in (find_obstacle_in_server(threads=1) or "")


@pytest.mark.parametrize("is_loaded", [False, True])
def test_exit_collects_frozen_objects_only_where_triton_is_loaded(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    if is_loaded:
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", SimpleNamespace())
    unfreeze_for_leak_reports()
    assert calls == ["unfreeze"] * is_loaded


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'", "OMP_NUM_THREADS"),
        ('os.environ [ "MKL_NUM_THREADS" ]=n', "MKL_NUM_THREADS"),
        ("environ.setdefault('KMP_AFFINITY', 'compact')", "KMP_AFFINITY"),
        ("os.environ.update({'TORCH_LOGS': '+all'})", "TORCH_LOGS"),
        ("os.putenv('PYTORCH_JIT', '0')", "PYTORCH_JIT"),
        ("os.environ['OMP_NUM_THREADS'] == '4'", None),
        ("threads = os.environ['OMP_NUM_THREADS']", None),
        ("os.environ.get('OMP_NUM_THREADS', '1')", None),
        ("os.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'", None),
        ("os.environ['TORCH_HOME'] = '/cache'", None),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'", None),
    ],
)
def test_variable_set_before_import_is_obstacle(folder: Path, line: str, name: str | None) -> None:
    (folder / "package").mkdir()
    for path in ("train.py", "package/train.py", "package/__main__.py"):
        (folder / path).write_text(f"import os\n{line}\nimport torch\n")
    programs = [("script", "train.py"), ("script", "package"), ("module", "package.train"), ("module", "package")]
    for kind, target in (*programs, ("code", line)):
        obstacle = find_obstacle(kind, target)
        assert (obstacle and obstacle.split()[3]) == name, (kind, target)


@pytest.mark.parametrize("shadow", ["json.py", "json/__init__.py"])
def test_file_shadowing_imported_module_is_obstacle(folder: Path, shadow: str) -> None:
    (folder / "src" / "json").mkdir(parents=True)
    (folder / "src" / "train.py").write_text("")
    (folder / "train.py").symlink_to("src/train.py")
    assert find_obstacle("script", "train.py") is None
    (folder / "src" / shadow).write_text("")
    assert f"src/{shadow} shadows" in (find_obstacle("script", "train.py") or "")
    assert find_obstacle("code", "pass") is None
