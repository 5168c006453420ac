"""Programs that only record how they were called, for tests of shell scripts that call many of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path


def run_script(
    script: Path, *arguments: str, folder: Path, tool: str, tools: Iterable[str], basics: Iterable[str], **env: str
) -> tuple[int, str, list[str]]:
    """Run a script with only these programs in PATH. Return its exit code, its output and the calls.

    ``tool`` is the shell script that replaces each of ``tools``; it appends its call to the file of ``CALLS``.
    ``basics`` are programs of this machine.
    """
    programs = folder / "tools"
    programs.mkdir(exist_ok=True)
    for name in tools:
        (programs / name).write_text(tool)
        (programs / name).chmod(0o755)
    for name in basics:
        program = shutil.which(name)
        assert program, name
        (programs / name).symlink_to(program)
    calls = folder / "calls"
    calls.touch()
    environment = {"PATH": str(programs), "CALLS": str(calls), "TMPDIR": str(folder), **env}
    done = subprocess.run(
        [script, *arguments], env=environment, text=True, capture_output=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()
