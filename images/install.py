"""Install packages for another architecture into /opt/venv: ``install.py ARCHITECTURE PIP-ARGUMENTS…``.

pip selects wheels by their names, and none of their programs runs, so an amd64 machine builds images for arm64 without
an emulator. Only wheels are installed, and the project itself with ``--no-deps``, which is pure Python. This program
compiles the modules reproducibly, because pip's compilation would store file times.
"""

import importlib.util
import marshal
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
GLIBC = 36
"""The minor version of the C library in the base image (Debian bookworm)."""
VENV = Path("/opt/venv")
BACKEND = Path("/opt/build-backend")
"""Folder of the build backend. It is not copied into the image."""


def platforms(architecture: str) -> list[str]:
    """Return pip's names of the platforms of the base image, the newest first."""
    machine = MACHINES[architecture]
    return [*(f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 16, -1)), f"manylinux2014_{machine}"]


def command(architecture: str, arguments: list[str], target: Path) -> list[str]:
    """Return pip's command line. ``target``: a folder, which pip requires for another architecture."""
    chosen = [word for name in platforms(architecture) for word in ("--platform", name)]
    built = [] if "--no-deps" in arguments else ["--only-binary=:all:"]
    # The environment's Python runs the base's pip, so that installed scripts start with that Python.
    pip = [sys.executable, "-m", "pip", "--python", str(VENV / "bin/python"), "install", "--no-compile"]
    return [*pip, "--target", str(target), *chosen, *built, *arguments]


def backend_command() -> list[str]:
    """Return pip's command line that installs the build backend by its hash, in a separate folder."""
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--target", str(BACKEND)]
    return [*pip, "--no-deps", "--require-hashes", "-r", "images/backend.txt"]


def main() -> None:
    """Install, and move the scripts to the environment's ``bin``."""
    architecture, *arguments = sys.argv[1:]
    target = Path(sysconfig.get_path("purelib", "venv", {"base": str(VENV)}))
    if "--no-deps" in arguments:
        subprocess.run(backend_command(), check=True)
        arguments.append("--no-build-isolation")
    subprocess.run(command(architecture, arguments, target), check=True, env=os.environ | {"PYTHONPATH": str(BACKEND)})
    for script in (target / "bin").glob("*"):
        shutil.move(script, VENV / "bin" / script.name)
    (target / "bin").rmdir()
    if "--no-deps" in arguments:  # the last step
        compile_all(target)


def compile_all(target: Path) -> None:
    """Compile every module below a folder reproducibly, with PEP 552's unchecked hash.

    ``compileall`` is not reproducible, because marshal marks shared objects (python/cpython#78274).
    """
    for path in sorted(target.rglob("*.py")):
        source = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                code = compile(source, str(path), "exec", dont_inherit=True)
            except (SyntaxError, ValueError):  # templates and tests for another Python may not compile
                continue
        compiled = Path(importlib.util.cache_from_source(str(path)))
        compiled.parent.mkdir(exist_ok=True)
        header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
        compiled.write_bytes(header + marshal.dumps(code, 2))


if __name__ == "__main__":
    main()
