"""A server of pods: a process that has imported PyTorch, and forks launchers. Here is the side of its requester."""

import json
import os
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from .frames import pack, receive_with_descriptors, send_with_descriptors
from .processes import load_libc, set_parent_death_signal

SERVER_COMMAND: Final = "podserver"  # the launcher's subcommand
READY: Final = b"+"  # what the server sends when it has imported PyTorch
DESCRIPTORS: Final = 4  # of an order: output, errors, the pipe for the process id, and the one that a variable names
_START_SECONDS: Final = 120.0  # for the import on a busy machine; afterwards the pod starts in a fresh interpreter
_PART_SECONDS: Final = 0.5
# Variables that an interpreter or a library reads only once.
_EARLY: Final = re.compile(r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|LD|MALLOC|GLIBC|PYTHON)(?!PATH$)_?\w*")


class PodStart(NamedTuple):
    """A pod to start. ``arguments``: those of the launcher, from ``run`` on; ``folder``: its working directory.

    ``variable``: the environment variable that gets the number of the descriptor which the pod receives.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    variable: str


def receive_start(orders: socket.socket) -> tuple[PodStart, list[int]] | None:
    """Return the next order and its file descriptors; None: there will be none."""
    order = receive_with_descriptors(orders, DESCRIPTORS)
    return None if order is None else (PodStart(**json.loads(order.data)), order.descriptors)


class PodServer:
    """A server. It dies with this process. Create it in the main thread, with whose end the kernel ends it.

    ``launcher``: the interpreter and the launcher's file; ``folder``: None for the present one. This process has to be
    a subreaper (``adopt_orphans``): a forked pod is its child.
    """

    def __init__(self, launcher: Sequence[str], environment: Mapping[str, str], folder: str | None = None) -> None:
        self._interpreter = launcher[0]
        self._environment = environment
        self._orders, theirs = socket.socketpair()
        self._is_ready = False
        self._waiting = threading.Lock()  # one thread reads the message for all
        load_libc()  # before the fork, for the child
        with theirs:
            arguments = [SERVER_COMMAND, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [launcher[0], "-u", launcher[1], *arguments],
                env=environment,
                cwd=folder,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(set_parent_death_signal, os.getpid()),  # noqa: PLW1509 (from the main thread)
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def fits(self, interpreter: str, environment: Mapping[str, str]) -> bool:
        """Return whether a pod would import the same PyTorch in the same way."""
        return interpreter == self._interpreter and _select_early(environment) == _select_early(self._environment)

    def wait(self) -> bool:
        """Wait for the import of PyTorch. Returns whether the server can fork pods; otherwise it is ended."""
        with self._waiting:
            deadline = time.monotonic() + _START_SECONDS
            # In short parts: another thread may end the server, and close this socket, meanwhile.
            while not self._is_ready and (descriptor := self._orders.fileno()) >= 0:
                try:
                    has_message = bool(select.select([descriptor], [], [], _PART_SECONDS)[0])
                    self._is_ready = has_message and self._orders.recv(1) == READY
                except OSError:
                    return False
                if not self._is_ready and (has_message or time.monotonic() > deadline):
                    self.end()
            return self._is_ready

    def fork(self, start: PodStart, descriptors: Sequence[int]) -> int | None:
        """Fork a pod, see ``wait``; return its process id, None if the server cannot.

        ``descriptors``: of the pod's output, its errors, and the one of ``start.variable``.
        """
        if not self.wait():
            return None
        pid_start, pid_end = os.pipe()
        message = pack(json.dumps(start._asdict()).encode())
        try:
            send_with_descriptors(self._orders, message, [*descriptors[:2], pid_end, *descriptors[2:]])
        except OSError:
            os.close(pid_start)
            return None
        finally:
            os.close(pid_end)
        with os.fdopen(pid_start, "rb") as stream:
            if not select.select([stream], [], [], _START_SECONDS)[0]:
                self.end()
                return None
            text = stream.read()
        return int(text) if text else None

    def end(self) -> None:
        """End the server. It has no pods: a pod is a child of this process."""
        self._process.kill()
        self._process.wait()
        self._orders.close()


def _select_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _EARLY.fullmatch(name)}
