"""The rendezvous: its store on pod 0, which pods an elastic job waits for, and which it takes for dead."""

import errno
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Callable, Optional

from ...contract.failure_record import KnownFailure
from ...contract.failure_table import EXIT_CODES
from ...contract.names import EXIT_RETRYABLE
from ..failures.text import PORT_REMEDY
from ..files import log
from ..pod import Pod

_SECONDS_FOR_STORE = 2.0
_UNRESOLVED = "name does not resolve yet"
_REFUSED = "nothing listens there yet"
FREE_RESTARTS = 100  # in the same pods and after losing a peer, in an elastic job: more than that is no accident
_FIRST_CALL_SECONDS = 30.0  # how long an elastic job waits for its first pods once there are enough to begin
_GONE_SECONDS = 1.0  # after which a pod that shows no sign of life is not waited for when the others meet again


class AwakeClock:
    """Seconds that this process has been there to see; of a pause in which it was frozen no more than ``most`` count.

    A budget that is used up by such a pause (a suspended laptop, `docker pause`, a machine without a free CPU) says
    nothing about those who are watched: they may have been frozen as well, and nothing has checked meanwhile. Times are
    of a monotonic clock.
    """

    def __init__(self, most: float, now: float) -> None:
        self._most, self._last, self._seen = most, now, 0.0

    def tick(self, now: float) -> float:
        """Note a check, and return the time of it."""
        self._seen, self._last = self.read(now), now
        return self._seen

    def read(self, now: float) -> float:
        """Return the time between two checks."""
        return self._seen + min(max(0.0, now - self._last), self._most)


class PortTakenError(KnownFailure):
    """The rendezvous store cannot listen on its port."""

    def __init__(self, port: int, problem: str) -> None:
        message = f"cannot serve the rendezvous on port {port}: {problem}"
        super().__init__(message, EXIT_CODES[EXIT_RETRYABLE], PORT_REMEDY)


def fork_store(torch: Any, host: str, port: int, guard: int, channel: socket.socket) -> int:
    """Host the rendezvous store in a process of its own, so that it outlives the agent but not the launcher.

    ``host``: a loopback address, to listen there alone (``loopback``), or any other, to listen everywhere.
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
        try:
            store = torch.distributed.TCPStore(host, port, None, True, wait_for_workers=False)
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
        with suppress(Exception):  # there is no store any more
            results.append(question())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_SECONDS_FOR_STORE)
    return results


def wait_for_master(
    host: str, port: Optional[int], timeout: float, report: Callable[[Optional[str]], None] = lambda problem: None
) -> Optional[str]:
    """Return None once ``host`` resolves and, given a port, answers; else the last problem. Logs while it waits.

    ``report`` gets the problem with each line of the log, and None at the end.
    """
    start = time.monotonic()
    pause, next_log, logged = 0.01, 3.0, False
    target = host if port is None else f"{host}:{port}"
    while True:
        problem = _probe(host, port)
        waited = time.monotonic() - start
        if problem is None:
            if logged:
                log(f"{target} is reachable after {waited:.1f} s")
                report(None)
            return None
        if waited >= timeout:
            return problem
        if waited >= next_log:
            log(f"waiting for master {target} ({problem}); {timeout - waited:.0f} s left")
            report(problem)
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


def _probe(host: str, port: Optional[int]) -> Optional[str]:
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
        with suppress(OSError), open(path, encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
            count += sum(row[3] == "01" and row[1].endswith(f":{port:04X}") for row in rows)
    return count


class RendezvousQuorum:
    """When an elastic job's pods have met: whom to wait for, and for how long.

    torchrun knows a least and a greatest number. In between it waits a fixed time, too short for the first start and
    too long for every other. We know better: at first the pods that were asked for, later those that were there.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._known: set[Any] = set()
        self._since: tuple[int, float] = (-1, 0.0)
        self._free = 0

    def start_round(self, state: Any) -> None:
        """Note who is there before this pod leaves the round that it was in."""
        self._known = {*state.participants, *state.wait_list} if state.complete else set()

    def take_free_restart(self) -> bool:
        """Take one of the free restarts. Returns whether there was one."""
        self._free += 1
        return self._free <= FREE_RESTARTS

    def decide(self, state: Any, node: Any, least: int, now: float) -> Optional[bool]:
        """Return whether the round is complete now; None: as torchrun sees it. Times are of a monotonic clock."""
        if state.complete or node not in state.participants or len(state.participants) < least:
            return None
        if self._since[0] != state.round:
            self._since = (state.round, now)
        waited = now - self._since[1]
        if state.round == 0:
            return True if len(state.participants) >= self._nodes else None if waited > _FIRST_CALL_SECONDS else False
        missing = self._known - set(state.participants)
        if not self._known or (missing and waited <= _GONE_SECONDS):
            return None
        return True if all(one not in state.last_heartbeats for one in missing) else None


class TrainingOver(Exception):
    """The rendezvous was closed while this pod waited for a seat."""


class Seats:
    """Who takes part in a job with spares: who did before, pod 0 in any case, and a spare for who is lost."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._members: set[Any] = set()
        """Of the last round that was complete."""
        self._round = -1
        self._since: tuple[int, float] = (-1, 0.0)
        self._full = 0.0  # when all seats were taken last

    def note(self, state: Any) -> None:
        """Note who takes part: some may have left the round already, but it goes on until all have."""
        if state.complete and state.round != self._round:
            self._members, self._round = set(), int(state.round)
        if state.complete:
            self._members |= set(state.participants)

    def waits(self, state: Any, node: Any, now: float) -> bool:
        """Return whether a pod that is no participant has to wait; ``now`` is of a monotonic clock.

        Raises: TrainingOver.
        """
        self.note(state)
        if state.closed and node not in self._members:
            raise TrainingOver
        if not state.complete and self._since[0] != state.round:
            self._since = (state.round, now)
        seats = self._pod.nodes - len(state.participants)
        if state.complete:
            waits = seats <= 0
        elif self._pod.node == 0 or node in self._members:
            waits = False
        else:
            seats -= all(one.addr != self._pod.master for one in state.participants)
            waits = seats <= self._count_expected(state, now - self._since[1])
        if waits:
            self._full = now
        return waits

    def deadline(self, deadline: float) -> float:
        """Return until when to wait for the others: time in which nobody was needed does not count."""
        return max(deadline, self._full + self._pod.join_timeout_seconds)

    def _count_expected(self, state: Any, waited: float) -> int:
        """Return how many seats, pod 0's aside, are kept for others that may still come."""
        if not self._members:  # the first meeting is that of the lower indexes
            spare = self._pod.node >= self._pod.nodes and waited <= _FIRST_CALL_SECONDS
            return self._pod.nodes if spare else 0
        absent = {one for one in self._members if one not in state.participants and one.addr != self._pod.master}
        # Who leaves the round before comes back at once, and is not to be seen in between.
        return len(absent if waited <= _GONE_SECONDS else absent & set(state.last_heartbeats))


class Heartbeats:
    """Whose heartbeats have ended, as far as this pod has been there to see.

    torchrun goes by the time in the store: where that, or a busy machine, has held up everybody for long enough, the
    first to get on takes all others for dead and meets without them, while they train on: two groups, one checkpoint.
    So a pod counts as dead only when its last heartbeat was seen, and seen again, for as long as torchrun waits.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._clock = AwakeClock(patience / 3, now)
        self._seen: dict[Any, tuple[Any, float]] = {}

    def live_nodes(self, beats: dict[Any, Any], now: float) -> list[Any]:
        """Take in the last heartbeat of each pod; return those that may live. ``now`` is of a monotonic clock."""
        time_ = self._clock.tick(now)
        before, self._seen = self._seen, {}
        for node, beat in beats.items():
            same = node in before and before[node][0] == beat
            self._seen[node] = before[node] if same else (beat, time_)
        return [node for node, (_, since) in self._seen.items() if time_ - since < self._patience]
