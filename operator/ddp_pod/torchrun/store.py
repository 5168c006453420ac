"""The rendezvous store: the process on pod 0 that hosts it, and the signed values that pods exchange through it.

Anyone who reaches the port can write to a TCPStore. So the pods sign their values with the attempt's secret, and ignore
all others. Only values with a valid signature are parsed, as JSON.
"""

import hashlib
import hmac
import json
import os
import queue
import re
import resource
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..base.known_failure import KnownFailure
from ..contract.failure_table import NETWORK, Outcome
from ..contract.names import EXIT_RETRYABLE

VALUE_LIMIT = 4 << 20  # bytes; the log of 5,000 pods has less than one MiB
# Bytes of all values and connections. Anyone who reaches the port may write: beyond it the store refuses values. The
# ranks need the container's memory: the store gets this part of it at most.
MEMORY_LIMIT = 512 << 20
_MEMORY_PART = 8
_PORT_REMEDY = (
    "another container of the pod listens on that port, or with hostNetwork another process of the node: let it use "
    "another, or create the job again with another spec.rendezvous.port"
)
_MAC_LENGTH = 64  # hexadecimal digits
_BACKLOG = 2048
_SECONDS_FOR_STORE = 2.0
# compare_set returns it for a key that does not exist: so it reads without waiting for the key.
_ABSENT = "absent"


class PortTakenError(KnownFailure):
    """The rendezvous store cannot listen on its port."""

    def __init__(self, port: int, problem: str) -> None:
        message = f"cannot serve the rendezvous on port {port}: {problem}"
        super().__init__(message, Outcome(NETWORK.name, EXIT_RETRYABLE), _PORT_REMEDY)


class SignedStore:
    """Values in a torch store as signed JSON. ``scope``: the run and the round; a value copied from another is invalid.

    No method waits for a key. All raise the exceptions of the store's calls.
    """

    def __init__(self, store: Any, secret: str, scope: str) -> None:
        self._store = store
        self._secret = secret.encode()
        self._scope = scope

    def read(self, key: str) -> Any:
        """Return a value; None if there is none, or none with a valid signature."""
        return self._verify(key, self._fetch(key))

    def write(self, key: str, value: Any) -> None:
        """Set a value."""
        self._store.set(self._name(key), self._sign(key, value))

    def delete(self, key: str) -> None:
        """Delete a value."""
        self._store.delete_key(self._name(key))

    def append(self, key: str, value: Any) -> None:
        """Append a value to a log."""
        self._store.append(self._name(key), f"\n{self._sign(key, value)}\n")

    def read_log(self, key: str) -> list[Any]:
        """Return the valid values of a log, in the order in which they were appended."""
        lines = [line for line in self._fetch(key).split("\n") if len(line) > _MAC_LENGTH]
        values = [self._verify(key, line) for line in lines]
        return [value for value in values if value is not None]

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys that exist, None for one without a valid signature."""
        stored = self._store.multi_get([self._name(key) for key in keys])
        return [self._verify(key, stored[place].decode(errors="replace")) for place, key in enumerate(keys)]

    def _name(self, key: str) -> str:
        return f"{self._scope}/{key}"

    def _fetch(self, key: str) -> str:
        """Return a stored text; empty if there is none, or one beyond the limit."""
        raw = self._store.compare_set(self._name(key), _ABSENT, _ABSENT)
        if raw == _ABSENT.encode() or len(raw) > VALUE_LIMIT:
            return ""
        return str(raw.decode(errors="replace"))

    def _sign(self, key: str, value: Any) -> str:
        text = json.dumps(value, separators=(",", ":"))
        return self._compute_mac(key, text) + text

    def _verify(self, key: str, signed: str) -> Any:
        mac = signed[:_MAC_LENGTH]
        text = signed[_MAC_LENGTH:]
        if not hmac.compare_digest(mac.encode(), self._compute_mac(key, text).encode()):
            return None
        return json.loads(text)

    def _compute_mac(self, key: str, text: str) -> str:
        message = f"{self._scope}\n{key}\n{text}".encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def host_store(address: str, port: int, **options: Any) -> Any:
    """Host a store that listens on one address only; on all if it is empty. Raises: OSError, RuntimeError."""
    if not address:
        return TCPStore("localhost", port, None, True, wait_for_workers=False, **options)
    listener = socket.create_server(
        (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=_BACKLOG
    )
    port = listener.getsockname()[1]
    if torch.__version__ < "2.8":  # before, the backend on libuv cannot take a listening socket
        options["use_libuv"] = False
    descriptor = listener.detach()  # the store closes it
    return TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=descriptor, **options)


def fork_store(address: str, port: int, guard: int, channel: socket.socket) -> int:
    """Host the rendezvous store in a separate process, which outlives the agent but not the launcher.

    ``address``: see ``host_store``; ``guard``: a pipe that the launcher keeps open. Returns the process id.
    Raises: PortTakenError.
    """
    ready, ready_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready_end)
        problem = os.read(ready, 4096)
        os.close(ready)
        if problem != b"ok":
            raise PortTakenError(port, problem.decode(errors="replace"))
        return pid
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        channel.close()
        _limit_memory(compute_memory_limit())
        try:
            store = host_store(address, port)
        except Exception as error:
            os.write(ready_end, str(error).encode()[:4096] or b"?")
            os._exit(1)
        os.write(ready_end, b"ok")
        os.close(ready_end)
        os.read(guard, 1)  # returns when the launcher closes its end or has ended
        del store
    finally:
        os._exit(0)


def read_memory_limit() -> int | None:
    """Return the cgroup's memory limit in bytes; None without a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                return int(file.read(64))
        except (OSError, ValueError):
            continue  # no limit, or the other version of cgroups
    return None


def compute_memory_limit() -> int:
    """Return how many bytes the store may allocate."""
    container = read_memory_limit()
    return MEMORY_LIMIT if container is None else min(MEMORY_LIMIT, container // _MEMORY_PART)


def _limit_memory(growth: int) -> None:
    """Let this process allocate ``growth`` more bytes at most."""
    with suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        match = re.search(r"^VmData:\s*(\d+) kB", file.read(), re.MULTILINE)
        if match is not None:
            limit = int(match[1]) * 1024 + growth
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Questioner:
    """Makes calls in a thread of its own, as a call cannot be ended. One that does not return keeps its thread.

    One thread for all calls until then: a thread for each costs more than the call, in every pod at every restart.
    An executor would not do: the interpreter waits for its threads at the end.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None

    def ask(self, query: Callable[[], Any]) -> Any | None:
        """Return the result of a call; None if it fails, or takes too long."""
        if self._waiting is None:
            self._waiting = queue.SimpleQueue()
            threading.Thread(target=self._answer, args=[self._waiting], daemon=True, name="store").start()
        answer: Future[Any] = Future()
        self._waiting.put((query, answer))
        try:
            return answer.result(_SECONDS_FOR_STORE)
        except TimeoutError:
            self._waiting = None
            return None

    def _answer(self, waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
        while self._waiting is waiting:
            query, answer = waiting.get()
            result = None
            with suppress(Exception):  # the store has ended
                result = query()
            answer.set_result(result)


_questioner = _Questioner()


def query_store(query: Callable[[], Any]) -> Any | None:
    """Return the result of a store's call; None if the store does not respond in time. For the agent's main thread."""
    return _questioner.ask(query)
