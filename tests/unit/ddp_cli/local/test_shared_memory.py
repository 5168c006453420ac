"""Memory of pods on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ddp_cli.local.shared_memory import SharedMemory


def test_memory_of_a_pod_ends_with_the_pod(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    first = memory.create_folder("a")
    second = memory.create_folder("b")
    assert first is not None
    assert second is not None
    (first / "state-0").write_bytes(b"x")
    memory.remove_folder("a")
    assert not first.exists()
    assert second.exists()
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_of_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from ddp_cli.local.shared_memory import SharedMemory\n"
        "SharedMemory(Path(sys.argv[1])).create_folder('a'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    [abandoned] = tmp_path.iterdir()
    memory = SharedMemory(tmp_path)
    memory.create_folder("b")
    assert not abandoned.exists()
    memory.close()


def test_memory_of_a_running_run_is_kept(tmp_path: Path) -> None:
    running = SharedMemory(tmp_path)
    folder = running.create_folder("a")
    memory = SharedMemory(tmp_path)
    memory.create_folder("b")
    assert folder is not None
    assert folder.exists()
    memory.close()
    running.close()
