"""A container made of the kernel's namespaces, without a runtime and without an image: a program for tests.

It reads a ``Container`` (``tests/support/container.py``) as JSON, builds its file system from folders of this machine,
and runs its command there: as process 1, as its user, without capabilities, with its variables alone. Where the kernel
refuses namespaces it prints the reason and ends with exit code ``NOT_POSSIBLE``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

NOT_POSSIBLE: Final = 77

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
SYS_MOUNT_SETATTR: Final = 442
AT_FDCWD: Final = -100
AT_RECURSIVE: Final = 0x8000
MOUNT_ATTR_RDONLY: Final = 0x1
PR_SET_PDEATHSIG: Final = 1
PR_CAPBSET_DROP: Final = 24
PR_SET_NO_NEW_PRIVS: Final = 38

LIBC = ctypes.CDLL(None, use_errno=True)


class NotPossible(Exception):
    """The kernel refuses a requirement of a container."""


def call_kernel(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises: NotPossible, OSError."""
    if getattr(LIBC, name)(*arguments) >= 0:
        return
    number = ctypes.get_errno()
    text = f"{name}: {os.strerror(number)}"
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise NotPossible(text)
    raise OSError(number, f"{text} {arguments}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    words = (os.fsencode(word) if word else None for word in (source, str(target), kind))
    call_kernel("mount", *words, flags, os.fsencode(options))


def forbid_writes(target: Path) -> None:
    """Make a mount and all mounts below it read-only."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    path = os.fsencode(target)
    call_kernel("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, ctypes.byref(attributes), size)


def enter_namespaces(user: int, group: int) -> None:
    """Detach from this machine's mounts and processes; without root, use a user namespace."""
    own_user = os.geteuid()
    own_group = os.getegid()
    rootless = own_user != 0
    call_kernel("unshare", CLONE_NEWNS | CLONE_NEWPID | (CLONE_NEWUSER if rootless else 0))
    if rootless:
        map_user("setgroups", "deny")
        map_user("uid_map", f"{user} {own_user} 1")
        map_user("gid_map", f"{group} {own_group} 1")
    mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)


def map_user(name: str, text: str) -> None:
    """Write to a file of this process's user namespace. Raises: NotPossible."""
    try:
        Path("/proc/self", name).write_text(text)
    except PermissionError as error:
        raise NotPossible(str(error)) from None


def build_root(root: Path, request: dict[str, Any]) -> None:
    """Build the file system of the container; its volumes are mounted above it."""
    mount("container", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for path, text in request["files"].items():
        write_file(place(root, path), text)
    for path, target in request["links"].items():
        place(root, path).symlink_to(target)
    for path, source in request["shared"].items():
        share(source, place(root, path))
    for path in ("/proc", *(volume["path"] for volume in request["volumes"])):
        place(root, path).mkdir(parents=True, exist_ok=True)
    if request["read_only"]:
        forbid_writes(root)
    for volume in request["volumes"]:
        mount_volume(place(root, volume["path"]), volume, request["group"])
        # A checkout below /tmp would be hidden by the pod's volume there.
        for path, source in request["shared"].items():
            if Path(path).is_relative_to(volume["path"]):
                target = place(root, path)
                share(source, target)
                forbid_writes(target)


def place(root: Path, path: str) -> Path:
    """Return where a path of the container is on this machine, with its parent folder."""
    result = root / path.lstrip("/")
    result.parent.mkdir(parents=True, exist_ok=True)
    return result


def write_file(path: Path, text: str) -> None:
    """Write a file that every user may read."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)


def share(source: str, target: Path) -> None:
    """Show a folder or a file of this machine in the container."""
    if os.path.isdir(source):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    mount(source, target, flags=MS_BIND | MS_REC)


def mount_volume(target: Path, volume: dict[str, Any], group: int) -> None:
    """Mount an empty folder that the user may write to, or files that the user may read."""
    size = f",size={volume['size']}" if volume["size"] else ""
    mount("volume", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755{size}")
    for name, text in (volume["files"] or {}).items():
        path = target / name
        path.write_text(text, encoding="utf-8")
        os.chown(path, -1, group)
        path.chmod(0o440)
    if volume["read_only"]:
        forbid_writes(target)
    elif volume["files"] is None:
        os.chown(target, -1, group)
        target.chmod(0o2777)


def drop_privileges(user: int, group: int, groups: Iterable[int]) -> None:
    """Change to the user permanently."""
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    if os.geteuid() != user:
        os.setgroups(list(groups))
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    call_kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Last, because a change of the user resets it.
    call_kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_command(root: Path, request: dict[str, Any]) -> NoReturn:
    """Become process 1 of the container."""
    mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV)
    os.chroot(root)
    os.chdir(request["folder"])
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    drop_privileges(request["user"], request["group"], request["groups"])
    os.execvpe(request["command"][0], request["command"], request["env"])


def explain_failures(function: Any, *arguments: Any) -> None:
    """Call a function. If the kernel refuses, end this process with a separate exit code."""
    try:
        function(*arguments)
    except NotPossible as error:
        print(f"no namespaces here: {error}", file=sys.stderr, flush=True)
        os._exit(NOT_POSSIBLE)


def main() -> int:
    """Run a container to its end; return the exit code of its command."""
    request = json.load(sys.stdin)
    root = Path(request["root"])
    explain_failures(enter_namespaces, request["user"], request["group"])
    explain_failures(build_root, root, request)
    child = os.fork()
    if child == 0:
        explain_failures(run_command, root, request)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
