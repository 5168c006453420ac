"""What a forked pod has instead of its server's: the import path, and the mark by which `ddp` finds its processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_pod.contract.names import ENV_LOCAL_POD
from ddp_pod.torchrun.fork_server import PATHS, list_imported_below, replace_paths
from ddp_pod.torchrun.pod_server import find_removed_paths, list_import_folders, read_change_times
from tests.support import ROOT

_WRITE = """
from ddp_pod.torchrun.pod_server import write_mark
write_mark("----", "abcd")
print(open("/proc/self/environ").read().replace("\\0", "\\n"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of processes")
def test_mark_is_replaced_where_other_processes_read_it() -> None:
    environment = os.environ | {ENV_LOCAL_POD: "----", "AFTER": "----", PATHS: str(ROOT / "operator")}
    shown = subprocess.run(
        [sys.executable, "-c", _WRITE], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert f"{ENV_LOCAL_POD}=abcd" in shown
    assert "AFTER=----" in shown


def test_import_path_has_the_folders_of_the_new_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/former/a", "/former/b", "/python"])
    replace_paths(os.pathsep.join(["/former/a", "/former/b"]), os.pathsep.join(["/new/a", "/former/b"]))
    assert sys.path == ["/new/a", "/former/b", "/python"]
    replace_paths(os.pathsep.join(["/new/a", "/former/b"]), "")
    assert sys.path == ["/python"]


def test_modules_of_a_folder_that_another_pod_lacks_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = str(Path(__file__).parent)
    monkeypatch.setenv(PATHS, os.pathsep.join([own, "/kept"]))
    assert find_removed_paths({PATHS: "/kept"}) == own
    assert __file__ in list_imported_below(own)
    assert list_imported_below("/kept") == []
    assert find_removed_paths({PATHS: os.pathsep.join(["/kept", own])}) == ""
    assert list_imported_below("") == []


def test_installed_package_changes_a_folder_that_modules_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = tmp_path / "used"
    unused = tmp_path / "unused"
    for folder in (used, unused):
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
    (used / "ddp_imported_once.py").write_text("")
    importlib.import_module("ddp_imported_once")
    folders = list_import_folders()
    assert str(unused) not in folders
    before = read_change_times(folders)
    (unused / "ddp_other.py").write_text("")
    assert read_change_times(folders) == before
    os.utime(used, ns=(1, 1))  # as after an installation
    assert read_change_times(folders) != before
    monkeypatch.delitem(sys.modules, "ddp_imported_once")
