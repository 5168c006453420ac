"""Whether the user's program can be started, which is checked before PyTorch is imported."""

import os
import stat
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..contract.command_line import PythonLine

_FIRST_LINE = 256  # bytes that the kernel reads of it


class ProgramProblem(NamedTuple):
    """Why the user's program cannot be started. The remedy is empty if it depends on where the code comes from."""

    message: str
    remedy: str = ""


def find_missing_program(line: PythonLine | None, program: Sequence[str]) -> ProgramProblem | None:
    """Return why the user's program cannot be started. It is checked before PyTorch is imported.

    ``line``: the Python command line; None if ``program`` is no Python.
    """
    if line is None:
        return _check_program(program[0])
    if line.kind == "script" and not os.path.exists(line.target):
        return ProgramProblem(f"training script not found: {line.target} (looked in {os.getcwd()})")
    if line.kind == "module" and not line.flags and not _exists_module(line.target):
        return ProgramProblem(f"training module not found: {line.target} (looked in {os.getcwd()} and site-packages)")
    return None


def _check_program(name: str) -> ProgramProblem | None:
    import shutil  # not imported at the start of every pod

    path = shutil.which(name)
    if path is not None:
        return _check_interpreter(path)
    path = shutil.which(name, os.F_OK)
    if path is None and os.path.isdir(name):
        return ProgramProblem(f"{name} is a folder, not a program")
    if path is None:
        here = f"; the one in the working directory is ./{name}" if os.path.isfile(name) else ""
        return ProgramProblem(f"program not found: {name} (looked in PATH){here}")
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o111:
        message = f"uid {os.geteuid()} may not execute {path} (mode {mode:04o}), or its volume is mounted with noexec"
        return ProgramProblem(message, "set runAsUser or the mode, or copy it to a volume without noexec")
    return ProgramProblem(
        f"{path} exists, but is not executable (mode {mode:04o})",
        f"run it by its interpreter (command: [bash, {path}]), or make it executable: chmod +x, or defaultMode: 0755 "
        "of the ConfigMap's volume",
    )


def _check_interpreter(path: str) -> ProgramProblem | None:
    """Return the problem if the first line of a script names an interpreter that does not exist."""
    import shutil

    try:
        with open(path, "rb") as file:
            first = os.fsdecode(file.read(_FIRST_LINE).partition(b"\n")[0])
    except OSError:
        return None
    if not first.startswith("#!"):
        return None
    if first.endswith("\r"):
        return ProgramProblem(
            f"{path} has Windows line endings (CRLF), so its interpreter {first[2:].strip()!r} is not found",
            f"convert it (sed -i 's/\\r$//' {path}), and keep it so: *.sh text eol=lf in .gitattributes",
        )
    words = first[2:].split()
    if words and os.path.exists(words[0]) and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or shutil.which(words[0]):
        return None
    return ProgramProblem(
        f"the interpreter {words[0]} of {path} does not exist",
        "install it in the image, or correct the first line of the script, such as #!/usr/bin/env bash",
    )


def _exists_module(name: str) -> bool:
    from importlib import util

    sys.path.insert(0, os.getcwd())
    try:
        return util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)
