"""The user's folder in this pod: unpacked once, before the ranks start, and the packages that it asks for."""

import contextlib
import gzip
import hashlib
import lzma
import os
import select
import site
import subprocess
import sys
import tarfile
from typing import IO, Any, Iterator, cast

from .contract import EXIT_PREEMPTED, EXIT_RETRYABLE
from .files import log
from .pod import CodeConfig, PodSetupError
from .processes import set_parent_death_signal

_PIECE = 1 << 20
_XZ = b"\xfd7zXZ"
_LAST_LINES = 20
_LAST_BYTES = 8192
_POLL_SECONDS = 0.1
_MOST_MEMBERS = 1_000_000
_MOST_BYTES = 4 << 30  # of all files; `ddp submit` packs a quarter of it
_MOST_LINKS = 40  # that lead to one file, as in Linux


def prepare_code(code: CodeConfig, signals: list[int]) -> None:
    """Unpack the folder and install its packages. ``signals``: those that have come. Raises: PodSetupError."""
    count = unpack(code)
    log(f"the code {code.digest[:12]}: {count} files in {code.folder}")
    if code.requirements:
        install_packages(code, signals)


def unpack(code: CodeConfig) -> int:
    """Write the archive's files, once all of it has been checked. Returns how many there are. Raises: PodSetupError."""
    _check_archive(code)
    count = 0
    with _open_archive(code) as stream, _reporting_damage(code), tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            _write(archive, member, code.folder)
            count += 1
    return count


def _check_archive(code: CodeConfig) -> None:
    """Read the whole archive: each name and link stays in the folder, and the digest is that of the job."""
    names = ArchiveNames()
    with _open_archive(code) as stream, _reporting_damage(code):
        source = _Hashing(stream)
        with tarfile.open(fileobj=cast(IO[bytes], source), mode="r|") as archive:
            for member in archive:
                names.add(member)
            while source.read(_PIECE):  # what follows the last file counts too
                pass
        names.check()
    if source.digest != code.digest:
        raise PodSetupError(
            f"the archive with the code, {code.archive}, has the digest {source.digest[:12]}…, and spec.code.digest is "
            f"{code.digest[:12]}…: it is not what was submitted",
            _AGAIN,
        )


def _open_archive(code: CodeConfig) -> Any:
    try:
        with open(code.archive, "rb") as file:
            compressed = file.read(len(_XZ)) == _XZ
        return (lzma.open if compressed else gzip.open)(code.archive)
    except OSError as error:
        raise PodSetupError(
            f"the archive with the code, {code.archive}, cannot be read: {error.strerror}",
            "submit the job again with --workdir, which puts the code where spec.code says; spec.code.image comes only "
            "where Kubernetes' feature gate ImageVolume is on, elsewhere use --code-claim",
        ) from error


@contextlib.contextmanager
def _reporting_damage(code: CodeConfig) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise PodSetupError(f"the archive with the code, {code.archive}, is damaged: {error}", _AGAIN) from error
    except OSError as error:
        raise PodSetupError(
            f"the code cannot be unpacked in {code.folder}: {error.strerror or error}",
            "look at the node's disk and at the pod's limit for ephemeral-storage",
            EXIT_RETRYABLE,
        ) from error


class ArchiveNames:
    """The names and links of an archive, followed as the kernel would follow them in an empty folder."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._links: dict[str, str] = {}
        self._size = 0

    def add(self, member: tarfile.TarInfo) -> None:
        """Take in a member. Raises: tarfile.TarError."""
        if not (member.isfile() or member.issym()):
            raise tarfile.TarError(f"{member.name} is neither a file nor a link")
        parts = member.name.split("/")
        if os.path.isabs(member.name) or ".." in parts:
            raise tarfile.TarError(f"{member.name} leaves the folder")
        self._size += max(0, member.size)
        if len(self._names) >= _MOST_MEMBERS or self._size > _MOST_BYTES:
            raise tarfile.TarError(f"it has more than {_MOST_MEMBERS} files or {_MOST_BYTES >> 20} MiB")
        name = "/".join(part for part in parts if part not in ("", "."))
        if name in self._names:
            raise tarfile.TarError(f"{member.name} is in it twice")
        self._names.add(name)
        if member.issym():
            self._links[name] = member.linkname

    def check(self) -> None:
        """Check where the links lead. Raises: tarfile.TarError."""
        for name in self._links:
            self._follow(name)
        folders = {name.rpartition("/")[0] for name in self._names}
        for folder in folders:
            parts = folder.split("/")
            for end in range(1, len(parts) + 1):
                if "/".join(parts[:end]) in self._names:
                    raise tarfile.TarError(f"{folder} is a file or a link with files below it")

    def _follow(self, name: str) -> None:
        """Follow a link to its end, or to a name that does not exist."""
        todo = name.split("/")
        place: list[str] = []
        steps = 0
        while todo:
            part = todo.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                if not place:
                    raise tarfile.TarError(f"{name} leaves the folder")
                place.pop()
                continue
            place.append(part)
            target = self._links.get("/".join(place))
            if target is None:
                continue
            steps += 1
            if os.path.isabs(target) or steps > _MOST_LINKS:
                raise tarfile.TarError(f"{name} leaves the folder, or leads nowhere")
            place.pop()
            todo = [*target.split("/"), *todo]


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
    """Write one file or link of a checked archive, over what another pod has left. Raises: tarfile.TarError."""
    target = os.path.join(folder, member.name)
    parent = os.path.dirname(target)
    inside = os.path.realpath(folder)
    if os.path.commonpath([inside, os.path.realpath(parent)]) != inside:  # by a link that was in the folder before
        raise tarfile.TarError(f"{member.name} leaves the folder")
    os.makedirs(parent, exist_ok=True)
    if os.path.lexists(target):
        os.unlink(target)  # of a pod that was here before
    if member.issym():
        os.symlink(member.linkname, target)
    else:
        with cast(IO[bytes], archive.extractfile(member)) as source, open(target, "xb") as file:
            while True:
                data = source.read(_PIECE)
                if not data:
                    break
                file.write(data)
        os.chmod(target, member.mode & 0o755 | 0o644)


def install_packages(code: CodeConfig, signals: list[int]) -> None:
    """Install what the requirements file names, and let all Python of this pod find it. Raises: PodSetupError.

    A virtual environment beside the image's packages keeps those that are good enough (PyTorch), replaces others
    without touching them, and needs no right to write where the image has them.
    """
    requirements = os.path.join(code.folder, code.requirements or "")
    environment = os.path.join(code.packages, "venv")
    packages = os.path.join(environment, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
    if not os.path.exists(requirements):
        raise PodSetupError(
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
        raise PodSetupError(
            f"the packages of {code.requirements} cannot be installed: {error.strerror}",
            "look at the node's disk and at the pod's limit for ephemeral-storage",
            EXIT_RETRYABLE,
        ) from error
    found = [packages, *_read_path_files(packages)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*found, os.environ.get("PYTHONPATH")]))
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.path.dirname(python), os.environ.get("PATH")]))


def _run(line: list[str], env: dict[str, str], code: CodeConfig, signals: list[int]) -> None:
    """Run a program with its output in the log. Raises: PodSetupError where it fails, or the pod is asked to stop."""
    launcher, last = os.getpid(), b""
    with subprocess.Popen(
        line,
        env=env,
        cwd=code.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: set_parent_death_signal(launcher),  # noqa: PLW1509
    ) as process:
        output = cast(IO[bytes], process.stdout)
        while True:
            ready = select.select([output], [], [], _POLL_SECONDS)[0]
            if signals:
                process.kill()
                raise PodSetupError("asked to stop by a signal", "", EXIT_PREEMPTED)
            data = os.read(output.fileno(), _PIECE) if ready else b""
            if ready and not data:
                break
            os.write(2, data)
            last = (last + data)[-_LAST_BYTES:]
    if process.returncode:
        lines = last.decode(errors="replace").splitlines() or [f"exit code {process.returncode}"]
        errors = [text for text in lines if text.startswith("ERROR:")] or lines
        if errors[-1].endswith("No module named pip"):
            raise PodSetupError(
                f"pip cannot install {code.requirements}: the image has none",
                "choose an image that has pip or the packages, or submit without --pip",
            )
        raise PodSetupError(
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
