"""The launcher as pods have it: the files of its ConfigMap, behind a kubelet's symbolic links."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ddp_operator.manifests.children import load_launcher

RANK_MODULES = [
    "contract", "contract.names", "launcher", "launcher.counters", "launcher.files", "launcher.processes",
    "launcher.rank", "launcher.rank.import_hook", "launcher.rank.tracebacks", "launcher.rank.worker",
]  # fmt: skip
"""The launcher's packages and modules that every rank imports, sorted by name, below ``ddp_launcher``."""


def lay_out(folder: Path) -> Path:
    """Write the files to a new folder. Return the path of the program that a pod starts."""
    written = folder / "..2026_01_01_00_00_00.000000000"
    written.mkdir(parents=True)
    (folder / "..data").symlink_to(written.name)
    for name, text in load_launcher().files.items():
        (written / name).write_text(text, encoding="utf-8")
        (folder / name).symlink_to(f"..data/{name}")
    return folder / "launcher.py"


@cache
def delivered_launcher() -> Path:
    """Return the path of the program that a pod starts, in a folder shared by all tests of this process."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-launcher-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return lay_out(folder / "mount")
