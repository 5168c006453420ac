"""The launcher as pods have it: the two files of its ConfigMap with all features, behind a kubelet's symbolic links."""

from __future__ import annotations

import atexit
import io
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ddp_operator.manifests.children import load_launcher
from ddp_pod.contract.names import OPTIONAL_FEATURES

RANK_MODULES = [
    "base", "base.exceptions", "base.files", "base.runtime_files", "contract", "contract.names", "contract.processes",
    "rank", "rank.advice", "rank.anomaly", "rank.bindings", "rank.calls", "rank.child", "rank.circumstances",
    "rank.class_advice", "rank.collation", "rank.counter_slots", "rank.counters", "rank.end_notes",
    "rank.ended_children", "rank.failing_code", "rank.groups", "rank.helper_errors", "rank.hooks", "rank.lasting_files",
    "rank.library_calls", "rank.module_facts", "rank.near_names", "rank.own_ends", "rank.read_files",
    "rank.script_objects", "rank.shell_ends", "rank.source_files", "rank.sources", "rank.statements", "rank.tracebacks",
    "rank.values", "rank.ways", "rank.worker",
]  # fmt: skip
"""The launcher's packages and modules that every rank imports, sorted by name, below ``ddp_launcher``."""


def lay_out(folder: Path, replaced: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Write the files to a new folder. Return the path of the program that a pod starts.

    ``replaced``: other sources for modules of the archive, by their paths.
    """
    written = folder / "..2026_01_01_00_00_00.000000000"
    written.mkdir(parents=True)
    (folder / "..data").symlink_to(written.name)
    launcher = load_launcher(frozenset(OPTIONAL_FEATURES))
    archive = _replace_sources(launcher.archive, replaced) if replaced else launcher.archive
    for name, content in (("launcher.py", launcher.bootstrap.encode()), ("launcher.zip", archive)):
        (written / name).write_bytes(content)
        (folder / name).symlink_to(f"..data/{name}")
    return folder / "launcher.py"


def _replace_sources(archive: bytes, replaced: Mapping[str, str]) -> bytes:
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(result, "w") as new:
        assert replaced.keys() <= set(old.namelist())
        for name in old.namelist():
            new.writestr(name, replaced.get(name) or old.read(name))
    return result.getvalue()


@cache
def delivered_launcher() -> Path:
    """Return the path of the program that a pod starts, in a folder shared by all tests of this process."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-launcher-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return lay_out(folder / "mount")
