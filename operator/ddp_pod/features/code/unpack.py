"""The submitted code folder: unpack it and install its packages before the ranks start."""

import contextlib
import gzip
import hashlib
import importlib.util
import lzma
import os
import select
import site
import stat
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, cast

from ...base.files import log
from ...base.pod import PodSetupError
from ...contract.names import EXIT_PREEMPTED, EXIT_RETRYABLE
from ...contract.plan import CodeConfig
from ...contract.processes import set_parent_death_signal
from .requirements import digest_requirements

_PIECE = 1 << 20
_XZ = b"\xfd7zXZ"
_LAST_LINES = 20
_LAST_BYTES = 8192
_POLL_SECONDS = 0.1
_MOST_BYTES = 4 << 30  # of an archive, also uncompressed; the limit of `ddp submit` is a quarter of it
_MOST_HEADER = 128 << 10  # of one file: a name has up to 4 KiB; tarfile recurses for each extension of a header
_MOST_NAMES = 128 << 20  # of memory for all names and links
_NAME_OVERHEAD = 200  # bytes of memory for a name, beside its own
_MOST_LINKS = 40  # to follow for one name, as in Linux
# What the readers of archives raise for damaged ones; tarfile passes on those of zlib and of int().
_DAMAGE = (tarfile.TarError, EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, ValueError)
_RESUBMIT = "submit the job again with --workdir; if that reuses the same archive, delete it first"
_CHECK_DISK = "check the node's disk and the pod's limit for ephemeral-storage"


def prepare_code(code: CodeConfig, signals: list[int], former: str = "") -> bool:
    """Unpack the folder and install its packages. Returns whether packages were installed. Raises: PodSetupError.

    ``signals``: those received so far; ``former``: the archive that was unpacked there before.
    """
    count = unpack(code, former)
    log(f"unpacked code {code.digest[:12]}: {count} files in {code.folder}")
    return bool(code.requirements) and install_packages(code, signals)


def check_archive(code: CodeConfig) -> None:
    """Check the whole archive. Raises: PodSetupError."""
    with _reporting_damage(code), _copy_archive(code) as copy:
        _check_copy(copy, code)


def unpack(code: CodeConfig, former: str = "") -> int:
    """Check the whole archive, then write its files. Returns their number. Raises: PodSetupError.

    Others may write to the archive's volume meanwhile, so that both steps read one copy. Files of the archive
    ``former`` that this one lacks are removed; those that a run has written stay.
    """
    with _reporting_damage(code), _copy_archive(code) as copy:
        names = _check_copy(copy, code)
        if former:
            _remove_files(former, names, code.folder)
        count = 0
        for archive, member in _read_members(_Source(copy)):
            _write(archive, member, code.folder)
            count += 1
        return count


def _check_copy(copy: IO[bytes], code: CodeConfig) -> "ArchiveNames":
    """Return the names of an archive. Raises: PodSetupError, TarError."""
    digest = _compute_digest(copy)
    if digest != code.digest:
        raise PodSetupError(
            f"the code archive {code.archive} has digest {digest[:12]}…, but spec.code.digest is "
            f"{code.digest[:12]}…: it is not the submitted archive",
            _RESUBMIT,
        )
    names = ArchiveNames()  # after the digest: the names of another archive cost memory, and its links minutes
    source = _Source(copy)
    for _, member in _read_members(source):
        names.add(member)
    while source.read(_PIECE):  # its limit refuses much data after the last file
        pass
    names.check()
    return names


def _remove_files(former: str, names: "ArchiveNames", folder: str) -> None:
    """Remove the files of a former archive, which was checked when it was unpacked. Raises: OSError."""
    with open(former, "rb") as archive:
        for _, member in _read_members(_Source(archive)):
            path = os.path.join(folder, member.name)
            if member.name not in names and os.path.lexists(path):
                os.unlink(path)


def _compute_digest(copy: IO[bytes]) -> str:
    """Return the SHA-256 of the uncompressed archive. Raises: TarError."""
    stream = _uncompress(copy)
    digest = hashlib.sha256()
    while data := stream.read(_PIECE):
        digest.update(data)
        if stream.tell() > _MOST_BYTES:
            raise tarfile.TarError(f"the archive has more than {_MOST_BYTES >> 20} MiB")
    return digest.hexdigest()


def _uncompress(copy: IO[bytes]) -> lzma.LZMAFile | gzip.GzipFile:
    copy.seek(0)
    is_xz = copy.read(len(_XZ)) == _XZ
    copy.seek(0)
    return lzma.LZMAFile(copy) if is_xz else gzip.GzipFile(fileobj=copy)


def _read_members(source: "_Source") -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of an archive. ``tarfile`` reads each header into memory, so their size is limited."""
    with tarfile.open(fileobj=cast(IO[bytes], source), mode="r|") as archive:
        while True:
            source.limit = archive.offset + _MOST_HEADER
            member = archive.next()
            if archive.pax_headers:
                raise tarfile.TarError("it has headers for all files")
            if member is None:
                return
            source.limit += member.size + _MOST_HEADER
            yield archive, member
            archive.members = []  # type: ignore[attr-defined]  # which tarfile collects


def _copy_archive(code: CodeConfig) -> IO[bytes]:
    """Return a copy of the archive that nobody else can open. Raises: PodSetupError, OSError."""
    try:
        descriptor = os.open(code.archive, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
    except OSError as error:
        raise PodSetupError(
            f"cannot read the code archive {code.archive}: {error.strerror}",
            "submit the job again with --workdir, which puts the archive where spec.code expects it; an image "
            "needs the Kubernetes feature gate ImageVolume, without it use --code-claim",
        ) from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PodSetupError(f"the code archive {code.archive} is not a file", _RESUBMIT)
        os.makedirs(code.folder, exist_ok=True)
        copy = tempfile.TemporaryFile(dir=code.folder)  # noqa: SIM115 - the caller closes it
        for piece in iter(lambda: file.read(_PIECE), b""):
            copy.write(piece)
            if copy.tell() > _MOST_BYTES:
                raise tarfile.TarError(f"the archive has more than {_MOST_BYTES >> 20} MiB")
    return copy


@contextlib.contextmanager
def _reporting_damage(code: CodeConfig) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise PodSetupError(f"the code archive {code.archive} is damaged: {error}", _RESUBMIT) from error
    except OSError as error:
        message = f"cannot unpack the code in {code.folder}: {error.strerror or error}"
        raise PodSetupError(message, _CHECK_DISK, EXIT_RETRYABLE) from error


class ArchiveNames:
    """The names and links of an archive, resolved as the kernel would resolve them in an empty folder."""

    def __init__(self) -> None:
        self._targets: dict[bytes, bytes | None] = {}  # as bytes: a character of a string takes up to four times more
        self._memory = 0

    def add(self, member: tarfile.TarInfo) -> None:
        """Add a member. Raises: tarfile.TarError."""
        if not (member.isfile() or member.issym()) or member.issparse():
            raise tarfile.TarError(f"{member.name} is neither a file nor a link")
        if os.path.isabs(member.name) or ".." in member.name.split("/"):
            raise tarfile.TarError(f"{member.name} is outside of the folder")
        name = _encode_name(member.name)
        target = _encode(member.linkname)
        self._memory += len(name) + len(target) + _NAME_OVERHEAD
        if self._memory > _MOST_NAMES:
            raise tarfile.TarError(f"the archive has more than {_MOST_NAMES >> 20} MiB of names")
        if name in self._targets:
            raise tarfile.TarError(f"the archive has {member.name} twice")
        self._targets[name] = target if member.issym() else None

    def __contains__(self, name: str) -> bool:
        """Return whether the archive has a member."""
        return _encode_name(name) in self._targets

    def check(self) -> None:
        """Check that all links stay inside the folder. Raises: tarfile.TarError."""
        former = b""
        for name, target in self._targets.items():
            if target is not None:
                self._follow(name)
            folder = name.rpartition(b"/")[0]
            if folder == former:
                continue
            former = folder
            parts = folder.split(b"/")
            for end in range(1, len(parts) + 1):
                if b"/".join(parts[:end]) in self._targets:
                    raise tarfile.TarError(f"{os.fsdecode(folder)} is below a file or a link")

    def _follow(self, name: bytes) -> None:
        """Resolve a link to its target, or to a name that does not exist."""
        remaining = name.split(b"/")
        resolved: list[bytes] = []
        links = 0
        while remaining:
            part = remaining.pop(0)
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not resolved:
                    raise tarfile.TarError(f"{os.fsdecode(name)} links to a path outside of the folder")
                resolved.pop()
                continue
            resolved.append(part)
            target = self._targets.get(b"/".join(resolved))
            if target is None:
                continue
            links += 1
            if os.path.isabs(target) or links > _MOST_LINKS:
                raise tarfile.TarError(f"{os.fsdecode(name)} links to a path outside of the folder, or to itself")
            resolved.pop()
            remaining = [*target.split(b"/"), *remaining]


def _encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _encode_name(name: str) -> bytes:
    return b"/".join(part for part in _encode(name).split(b"/") if part not in (b"", b"."))


class _Source:
    """The uncompressed bytes of an archive, up to a limit."""

    def __init__(self, copy: IO[bytes]) -> None:
        self._stream = _uncompress(copy)
        self.limit = _MOST_HEADER

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if self._stream.tell() > self.limit:
            raise tarfile.TarError(f"a header, or what follows the last file, has more than {_MOST_HEADER >> 10} KiB")
        return data


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: str) -> None:
    """Write one file or link of a checked archive; replace a former pod's. Raises: tarfile.TarError."""
    target = os.path.join(folder, member.name)
    parent = os.path.dirname(target)
    inside = os.path.realpath(folder)
    if os.path.commonpath([inside, os.path.realpath(parent)]) != inside:  # through a link that a former pod wrote
        raise tarfile.TarError(f"{member.name} is outside of the folder")
    os.makedirs(parent, exist_ok=True)
    if os.path.lexists(target):
        os.unlink(target)
    if member.issym():
        os.symlink(member.linkname, target)
        return
    with cast(IO[bytes], archive.extractfile(member)) as source, open(target, "xb") as file:
        while data := source.read(_PIECE):
            file.write(data)
    os.chmod(target, member.mode & 0o755 | 0o644)
    if target.endswith(".py"):
        # Python compares the second and the size only: an edit within a second would run the former bytecode.
        with contextlib.suppress(OSError):
            os.unlink(importlib.util.cache_from_source(target))


def has_packages(code: CodeConfig, digest: str = "") -> bool:
    """Return whether packages are installed: those of a requirements file with this digest, or any."""
    try:
        with open(_stamp(code), encoding="ascii") as file:
            return not digest or file.read() == digest
    except OSError:
        return False


def _stamp(code: CodeConfig) -> str:
    """Return the path of the file that has the digest of the installed requirements."""
    return os.path.join(code.packages, "installed")


def install_packages(code: CodeConfig, signals: list[int]) -> bool:
    """Install the requirements file, and make all Python processes of this pod find the packages.

    Returns whether they were not installed already.

    A virtual environment on top of the image's packages keeps those that satisfy the requirements (PyTorch),
    overrides others without changing them, and needs no write access to the image's folders. Raises: PodSetupError.
    """
    requirements = os.path.join(code.folder, code.requirements or "")
    environment = os.path.join(code.packages, "venv")
    packages = _find_packages(environment)
    if not os.path.exists(requirements):
        raise PodSetupError(
            f"the submitted code has no {code.requirements}",
            "create it, or check whether .gitignore or .ddpignore excludes it, or submit without --pip",
        )
    digest = digest_requirements(requirements, code)
    if has_packages(code, digest):
        use_packages(code)
        return False
    log(f"pip install -r {code.requirements}, into {packages}")
    temporary = os.path.join(code.packages, "tmp")
    # If the image's Python is a virtual environment, the new one does not include its packages.
    inherited = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"), *_list_site_packages()) if path)
    env = {**os.environ, "PYTHONPATH": inherited, "TMPDIR": temporary, "HOME": temporary, "PIP_NO_INPUT": "1"}
    python = os.path.join(environment, "bin", "python")
    create = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", environment]
    install = [python, "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "-r", requirements]
    try:
        os.makedirs(temporary, exist_ok=True)
        _run(create, env, code, signals)
        _run(install, env, code, signals)
        with open(_stamp(code), "w", encoding="ascii") as file:
            file.write(digest)
    except OSError as error:
        message = f"cannot install the packages of {code.requirements}: {error.strerror}"
        raise PodSetupError(message, _CHECK_DISK, EXIT_RETRYABLE) from error
    use_packages(code)
    return True


def _find_packages(environment: str) -> str:
    return os.path.join(environment, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def use_packages(code: CodeConfig) -> None:
    """Make all later Python processes find the installed packages, once."""
    environment = os.path.join(code.packages, "venv")
    packages = _find_packages(environment)
    present = os.environ.get("PYTHONPATH", "")
    if packages in present.split(os.pathsep):
        return
    folders = [packages, *_read_path_files(packages)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, present]))
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.path.join(environment, "bin"), os.environ.get("PATH")]))


def _run(command: Sequence[str], env: dict[str, str], code: CodeConfig, signals: list[int]) -> None:
    """Run a program and copy its output to the log. Raises: PodSetupError if it fails or a signal stops the pod."""
    launcher = os.getpid()
    tail = b""
    with subprocess.Popen(
        command,
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
            tail = (tail + data)[-_LAST_BYTES:]
    if process.returncode:
        raise _explain_failed_install(process.returncode, tail, code)


def _explain_failed_install(exit_code: int, output: bytes, code: CodeConfig) -> PodSetupError:
    lines = output.decode(errors="replace").splitlines() or [f"exit code {exit_code}"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    if errors[-1].endswith("No module named pip"):
        return PodSetupError(
            f"cannot install {code.requirements}: the image has no pip",
            "use an image with pip or with the packages, or submit without --pip",
        )
    return PodSetupError(
        f"pip cannot install {code.requirements}: {errors[-1]}",
        f"fix {code.requirements}; packages that the pod cannot download must be in the image (PIP_INDEX_URL in the "
        "container's env sets another index), and files that .gitignore or .ddpignore excludes need --include PATH",
        output="\n".join(lines[-_LAST_LINES:]),
    )


def _list_site_packages() -> list[str]:
    """Return the package folders of this interpreter if it belongs to a virtual environment."""
    return site.getsitepackages() if sys.prefix != sys.base_prefix else []


def _read_path_files(packages: str) -> list[str]:
    """Return the folders of packages installed with -e. Python reads .pth files only in its own folders."""
    folders: list[str] = []
    for name in sorted(os.listdir(packages)):
        if not name.endswith(".pth"):
            continue
        with open(os.path.join(packages, name), encoding="utf-8", errors="replace") as file:
            folders += [line for line in file.read().splitlines() if os.path.isdir(line)]
    return folders
