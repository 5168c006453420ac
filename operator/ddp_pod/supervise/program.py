"""Whether the user's program can be started, which is checked before PyTorch is imported."""

import os
import stat
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..contract.command_line import PythonLine

_SHELLS = ("ash", "bash", "dash", "ksh", "sh", "zsh")
_SCRIPT_BYTES = 1 << 16
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
        return _check_program(program[0]) or _check_shell_script(program)
    if line.kind == "script" and not os.path.exists(line.target):
        return ProgramProblem(f"training script not found: {line.target} (looked in {os.getcwd()})")
    if line.kind == "script" and os.path.isdir(line.target) and not _has_main(line.target):
        return ProgramProblem(f"the folder {line.target} has no __main__.py, so that Python cannot run it")
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
        reason = f"its interpreter {first[2:].strip()!r} is not found"
        return _describe_line_ends(path, reason)
    words = first[2:].split()
    if words and os.path.exists(words[0]) and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words or shutil.which(words[0]):
        return None
    return ProgramProblem(
        f"the interpreter {words[0]} of {path} does not exist",
        "install it in the image, or correct the first line of the script, such as #!/usr/bin/env bash",
    )


def _check_shell_script(program: Sequence[str]) -> ProgramProblem | None:
    """Return the problem if a shell is to run a script whose lines all end as those of Windows do."""
    if os.path.basename(program[0]) not in _SHELLS or "-c" in program:
        return None
    path = next(filter(os.path.isfile, program[1:]), "")
    try:
        with open(path, "rb") as file:
            lines = file.read(_SCRIPT_BYTES).splitlines(keepends=True)
    except OSError:
        return None
    if not lines or not all(line.endswith(b"\r\n") for line in lines[:-1] or lines):
        return None
    return _describe_line_ends(path, "each command gets a carriage return at its end")


def _describe_line_ends(path: str, effect: str) -> ProgramProblem:
    return ProgramProblem(
        f"{path} has Windows line endings (CRLF), so {effect}",
        f"convert it (sed -i 's/\\r$//' {path}), and keep it so: *.sh text eol=lf in .gitattributes",
    )


def _has_main(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, f"__main__.{suffix}")) for suffix in ("py", "pyc"))


def _exists_module(name: str) -> bool:
    from importlib import util

    sys.path.insert(0, os.getcwd())
    try:
        return util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)
