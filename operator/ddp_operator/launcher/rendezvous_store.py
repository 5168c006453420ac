"""The rendezvous store: hosted on pod 0, waited for and queried by all."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from typing import Any, Callable

from .files import log
from .pod import Pod

_SECONDS_FOR_STORE = 2.0
_UNRESOLVED = "name does not resolve yet"
_REFUSED = "nothing listens there yet"


class PortTakenError(OSError):
    """The rendezvous store cannot listen on its port."""

    remedy = (
        "another process of that node has the port, as with hostNetwork: delete the job and create it again with "
        "another spec.rendezvous.port"
    )


def fork_store(torch: Any, port: int, guard: int, channel: socket.socket) -> int:
    """Host the rendezvous store in a process of its own, so that it outlives the agent but not the launcher.

    Raises: PortTakenError.
    """
    ready, ready_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready_end)
        problem = os.read(ready, 4096)
        os.close(ready)
        if problem != b"ok":
            raise PortTakenError(f"cannot serve the rendezvous on port {port}: {problem.decode(errors='replace')}")
        return pid
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        channel.close()
        try:
            store = torch.distributed.TCPStore("localhost", port, None, True, wait_for_workers=False)
        except Exception as error:
            os.write(ready_end, str(error).encode()[:4096] or b"?")
            os._exit(1)
        os.write(ready_end, b"ok")
        os.close(ready_end)
        os.read(guard, 1)  # returns when the launcher lets go or is gone
        del store
    finally:
        os._exit(0)


def query_store(question: Callable[[], Any]) -> list[Any]:
    """Return the result of a store's call as a list of one; nothing where the store does not respond in time."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(question())
        except Exception:
            pass  # there is no store any more

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_SECONDS_FOR_STORE)
    return results


def wait_for_master(host: str, port: int | None, timeout: float) -> str | None:
    """Return None once ``host`` resolves and, given a port, answers; else the last problem. Logs while it waits."""
    start = time.monotonic()
    pause, next_log, logged = 0.01, 3.0, False
    target = host if port is None else f"{host}:{port}"
    while True:
        problem = _probe(host, port)
        waited = time.monotonic() - start
        if problem is None:
            if logged:
                log(f"{target} is reachable after {waited:.1f} s")
            return None
        if waited >= timeout:
            return problem
        if waited >= next_log:
            log(f"waiting for master {target} ({problem}); {timeout - waited:.0f} s left")
            next_log, logged = waited + max(5.0, min(60.0, waited)), True
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)


def describe_absence(pod: Pod, problem: str) -> tuple[str, str]:
    """Return in words that pod 0 was not found, and what to check for this problem."""
    master, after = f"{pod.master}:{pod.port}", f"{pod.join_timeout_seconds:g} s"
    if problem == _UNRESOLVED:
        return (
            f"DNS has not resolved the name of pod 0, {pod.master}, within {after}",
            "check the cluster's DNS (kubectl -n kube-system get pods -l k8s-app=kube-dns), dnsPolicy and dnsConfig in "
            "spec.template, that the job's headless Service exists, and that no NetworkPolicy keeps the pods from DNS",
        )
    if problem == _REFUSED:
        return f"pod 0 has not served the rendezvous at {master} within {after}: {problem}", "look at the log of pod 0"
    return (
        f"pod 0 was not reached at {master} within {after}: {problem}",
        "check that it runs, and that no NetworkPolicy, firewall or service mesh closes the port",
    )


def _probe(host: str, port: int | None) -> str | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return _UNRESOLVED
    if port is None:
        return None
    problem = ""
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(2)
            try:
                connection.connect(address)
            except OSError as error:
                refused = error.errno == errno.ECONNREFUSED
                problem = _REFUSED if refused else f"no connection: {error.strerror or error}"
            else:
                return None
    return problem


def count_connections(port: int) -> int:
    """Return how many established TCP connections this machine has at a local port (Linux)."""
    count = 0
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        count += sum(row[3] == "01" and row[1].endswith(f":{port:04X}") for row in rows)
    return count
