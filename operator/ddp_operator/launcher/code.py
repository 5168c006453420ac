"""The user's folder in this pod: unpacked once, before the ranks start, and the packages that it asks for."""

import gzip
import hashlib
import lzma
import os
import select
import site
import subprocess
import sys
import tarfile
from typing import IO, Any, cast

from .contract import EXIT_PREEMPTED, EXIT_RETRYABLE
from .files import log
from .pod import CannotStart, CodeConfig
from .processes import die_with

_PIECE = 1 << 20
_XZ = b"\xfd7zXZ"
_LAST_LINES = 20
_LAST_BYTES = 8192
_POLL_SECONDS = 0.1


def prepare_code(code: CodeConfig, signals: list[int]) -> None:
    """Unpack the folder and install its packages. ``signals``: those that have come. Raises: CannotStart."""
    count = unpack(code)
    log(f"the code {code.digest[:12]}: {count} files in {code.folder}")
    if code.requirements:
        install_packages(code, signals)


def unpack(code: CodeConfig) -> int:
    """Write the archive's files. Returns how many there are. Raises: CannotStart."""
    try:
        with open(code.archive, "rb") as file:
            compressed = file.read(len(_XZ)) == _XZ
        opened: Any = (lzma.open if compressed else gzip.open)(code.archive)
    except OSError as error:
        raise CannotStart(
            f"the archive with the code, {code.archive}, cannot be read: {error.strerror}",
            "submit the job again with --workdir, which puts the code where spec.code says; spec.code.image comes only "
            "where Kubernetes' feature gate ImageVolume is on, elsewhere use --code-claim",
        ) from error
    source, count = _Hashing(opened), 0
    try:
        with opened, tarfile.open(fileobj=cast(IO[bytes], source), mode="r|") as archive:
            for member in archive:
                _write(archive, member, code.folder)
                count += 1
            while source.read(_PIECE):  # what follows the last file counts too
                pass
    except (tarfile.TarError, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise CannotStart(f"the archive with the code, {code.archive}, is damaged: {error}", _AGAIN) from error
    except OSError as error:
        raise CannotStart(
            f"the code cannot be unpacked in {code.folder}: {error.strerror or error}",
            "look at the node's disk and at the pod's limit for ephemeral-storage",
            EXIT_RETRYABLE,
        ) from error
    if source.digest != code.digest:
        raise CannotStart(
            f"the archive with the code, {code.archive}, has the digest {source.digest[:12]}…, and spec.code.digest is "
            f"{code.digest[:12]}…: it is not what was submitted",
            _AGAIN,
        )
    return count


_AGAIN = "submit the job again with --workdir; where that finds the same archive, delete it first"


class _Hashing:
    """A stream that is hashed as it is read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._sum = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._sum.update(data)
        return data


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: str) -> None:
    """Write one file or link, and nothing outside of the folder. Raises: tarfile.TarError."""
    target = os.path.join(folder, member.name)
    parent = os.path.dirname(target)
    inside = os.path.realpath(folder)
    os.makedirs(parent, exist_ok=True)
    leads = [os.path.realpath(parent)]
    if member.issym():
        leads.append(os.path.realpath(os.path.join(parent, member.linkname)))
    if os.path.isabs(member.name) or any(os.path.commonpath([inside, one]) != inside for one in leads):
        raise tarfile.TarError(f"{member.name} leaves the folder")
    if os.path.lexists(target):
        os.unlink(target)  # of a pod that was here before
    if member.issym():
        os.symlink(member.linkname, target)
    elif member.isfile():
        with cast(IO[bytes], archive.extractfile(member)) as source, open(target, "xb") as file:
            while True:
                data = source.read(_PIECE)
                if not data:
                    break
                file.write(data)
        os.chmod(target, member.mode & 0o755 | 0o644)
    else:
        raise tarfile.TarError(f"{member.name} is neither a file nor a link")


def install_packages(code: CodeConfig, signals: list[int]) -> None:
    """Install what the requirements file names, and let all Python of this pod find it. Raises: CannotStart.

    A virtual environment beside the image's packages keeps those that are good enough (PyTorch), replaces others
    without touching them, and needs no right to write where the image has them.
    """
    requirements = os.path.join(code.folder, code.requirements or "")
    environment = os.path.join(code.packages, "venv")
    packages = os.path.join(environment, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
    if not os.path.exists(requirements):
        raise CannotStart(
            f"there is no {code.requirements} in the code that was submitted",
            "write one, or see whether .gitignore or .ddpignore leaves it out, or submit without --pip",
        )
    log(f"pip install -r {code.requirements}, into {packages}")
    # Of an image whose Python is itself a virtual environment, the new one would not see the packages.
    seen = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"), *_list_site_packages()) if path)
    temporary = os.path.join(code.packages, "tmp")
    env = {**os.environ, "PYTHONPATH": seen, "TMPDIR": temporary, "HOME": temporary, "PIP_NO_INPUT": "1"}
    python = os.path.join(environment, "bin", "python")
    pip = [python, "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "-r", requirements]
    try:
        os.makedirs(temporary, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", environment], env, code, signals)
        _run(pip, env, code, signals)
    except OSError as error:
        raise CannotStart(
            f"the packages of {code.requirements} cannot be installed: {error.strerror}",
            "look at the node's disk and at the pod's limit for ephemeral-storage",
            EXIT_RETRYABLE,
        ) from error
    found = [packages, *_read_path_files(packages)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*found, os.environ.get("PYTHONPATH")]))
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.path.dirname(python), os.environ.get("PATH")]))


def _run(line: list[str], env: dict[str, str], code: CodeConfig, signals: list[int]) -> None:
    """Run a program with its output in the log. Raises: CannotStart where it fails, or the pod is asked to stop."""
    launcher, last = os.getpid(), b""
    with subprocess.Popen(
        line,
        env=env,
        cwd=code.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: die_with(launcher),  # noqa: PLW1509
    ) as process:
        output = cast(IO[bytes], process.stdout)
        while True:
            ready = select.select([output], [], [], _POLL_SECONDS)[0]
            if signals:
                process.kill()
                raise CannotStart("asked to stop by a signal", "", EXIT_PREEMPTED)
            data = os.read(output.fileno(), _PIECE) if ready else b""
            if ready and not data:
                break
            os.write(2, data)
            last = (last + data)[-_LAST_BYTES:]
    if process.returncode:
        lines = last.decode(errors="replace").splitlines() or [f"exit code {process.returncode}"]
        errors = [text for text in lines if text.startswith("ERROR:")] or lines
        if errors[-1].endswith("No module named pip"):
            raise CannotStart(
                f"pip cannot install {code.requirements}: the image has none",
                "choose an image that has pip or the packages, or submit without --pip",
            )
        raise CannotStart(
            f"pip cannot install {code.requirements}: {errors[-1]}",
            f"fix {code.requirements}; what the cluster's network cannot reach has to be in the image (PIP_INDEX_URL "
            "in the container's env names another index)",
            output="\n".join(lines[-_LAST_LINES:]),
        )


def _list_site_packages() -> list[str]:
    """Return where the packages of this interpreter are, if it is one of a virtual environment."""
    return site.getsitepackages() if sys.prefix != sys.base_prefix else []


def _read_path_files(packages: str) -> list[str]:
    """Return the folders that packages installed with -e name; Python reads such files in its own folders only."""
    found: list[str] = []
    for name in sorted(os.listdir(packages)):
        if name.endswith(".pth"):
            with open(os.path.join(packages, name), encoding="utf-8", errors="replace") as file:
                found += [line for line in file.read().splitlines() if os.path.isdir(line)]
    return found
