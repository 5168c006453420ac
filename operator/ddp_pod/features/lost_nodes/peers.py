"""Which of its peers a pod reaches: one witness of a lost node (docs/adr/0061-lost-node-by-several-witnesses.md).

Each pod connects to the ports of up to three others in turn, so each pod has up to three witnesses. The kernel of a
peer answers: neither a long garbage collection, a stopped process nor a busy CPU there counts as silence. The operator
listens to the first and the last pod of a job: a witness reports to these at once which pod it finds silent.
"""

import errno
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ...base.awake_clock import AwakeClock
from ...base.files import log
from ...base.pod import Pod
from ...base.service import Service
from ...contract.peers import MOST_HINTS, PeerContact, PeerReport, choose_peer_steps

_PATH: Final = "/peers"
_WAIT: Final = re.compile(r"wait=(\d)")
_HINT: Final = re.compile(r"silent=(\d{1,5})")
_HINT_SECONDS: Final = 10.0  # for which a hint is passed on
_INTERVAL: Final = 3.0  # between two probes: 75 bytes a second
_INTERVAL_OF_SUSPECT: Final = 1.0  # between two probes of a peer that is silent, or asked for
TIMEOUT: Final = 2.0
"""Of one probe or request, in seconds: the kernel repeats a lost packet after one second."""
_LONGEST_WAIT: Final = 8.0  # of a reader: the endpoint closes a connection after ten seconds
_LONGEST_PAUSE: Final = 5.0  # of this process that counts as silence of a peer
# The peer's kernel sends nothing more, and keeps no state of the connection.
_RESET: Final = struct.pack("ii", 1, 0)
_REFUSED: Final = (errno.ECONNREFUSED, errno.ECONNRESET)


class Address(NamedTuple):
    """Where a peer is reached. ``family``: of sockets."""

    family: int
    host: str


class _Peer:
    """What this pod knows of a peer. ``silent_since``: when the first probe without an answer began; None: it answers.

    A peer that has never answered counts for nothing: a NetworkPolicy may hide it, or it has not started.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.address: Address | None = None
        self.has_answered = False
        self.silent_since: float | None = None
        self.checked = 0.0
        self.due = 0.0

    def note(self, *, answers: bool, began: float) -> bool:
        """Note the result of a probe. Returns whether the peer has fallen silent, or answers again."""
        was_silent = self.silent_since is not None
        if answers:
            self.has_answered = True
            self.silent_since = None
        elif self.has_answered and not was_silent:
            self.silent_since = began
        return was_silent != (self.silent_since is not None)

    def move(self, address: Address | None) -> None:
        """Note where the peer is now. Another pod in its place has not answered yet."""
        if address != self.address:
            self.address = address
            self.has_answered = False
            self.silent_since = None


class PeerWatch(Service):
    """Probes some peers, and wakes its readers as soon as one is silent."""

    name = "peer watch"

    def __init__(
        self,
        pod: Pod,
        *,
        resolve: Callable[[str], Address | None] | None = None,
        probe: Callable[[Address, int], bool] | None = None,
        tell: Callable[[Address, int, int], None] | None = None,
    ) -> None:
        """``resolve``: raises OSError if the name service does not respond; ``probe``: whether an address answers.

        ``tell``: sends the index of a silent pod to another one, which may not respond.
        """
        self._pod = pod
        self._resolve = resolve or resolve_host
        self._probe = probe or probe_port
        self._tell = tell or send_hint
        self._hints: dict[int, float] = {}
        """When other pods have reported a silent pod to this one."""
        self._peers = [_Peer(index) for index in list_probed_peers(pod)]
        self._clock = AwakeClock(_LONGEST_PAUSE, time.monotonic())
        self._changed = threading.Condition()

    def run(self) -> None:
        """Probe the peers without end."""
        while self._peers:
            now = self._tick()
            peer = min(self._peers, key=lambda peer: peer.due)
            if peer.due > now:
                time.sleep(min(peer.due - now, _INTERVAL_OF_SUSPECT / 2))
                continue
            self.check(peer, now)

    def check(self, peer: _Peer, now: float) -> None:
        """Probe a peer. Its name is resolved again while it does not answer: another pod may have taken its place."""
        if peer.address is None or peer.silent_since is not None or not peer.has_answered:
            with suppress(OSError):  # without an answer of the name service the last address remains
                peer.move(self._resolve(self._pod.pod_host.format(peer.index)))
        answers = peer.address is not None and self._probe(peer.address, self._pod.metrics_port)
        with self._changed:
            has_changed = peer.address is not None and peer.note(answers=answers, began=now)
            is_suspect = peer.has_answered and not answers
            peer.checked = self._tick()
            peer.due = peer.checked + (_INTERVAL_OF_SUSPECT if is_suspect else _INTERVAL * len(self._peers))
            if has_changed:
                self._changed.notify_all()
        if has_changed and not answers:
            self._tell_listeners(peer.index)
        if has_changed:
            log(f"pod {peer.index} {'answers again' if answers else 'does not answer: its node may be lost'}")

    def _tell_listeners(self, silent: int) -> None:
        """Report a silent pod to those to which the operator listens. The probes do not wait for it."""
        for index in self.list_listeners(silent):
            threading.Thread(target=self._tell_listener, args=(index, silent), daemon=True).start()

    def list_listeners(self, silent: int) -> Sequence[int]:
        """Return the pods to which a silent one is reported: the first and the last, to which the operator listens."""
        return sorted({0, count_pods(self._pod) - 1} - {self._pod.node, silent})

    def _tell_listener(self, index: int, silent: int) -> None:
        with suppress(OSError):
            address = self._resolve(self._pod.pod_host.format(index))
            if address is not None:
                self._tell(address, self._pod.metrics_port, silent)

    def take_hint(self, silent: int) -> None:
        """Note that a pod is silent for a witness, and wake the readers. Any thread calls this."""
        now = time.monotonic()
        with self._changed:
            self._hints = {pod: since for pod, since in self._hints.items() if now - since < _HINT_SECONDS}
            if silent < count_pods(self._pod) and (silent in self._hints or len(self._hints) < MOST_HINTS):
                self._hints[silent] = now
                self._changed.notify_all()

    def read_page(self, path: str, query: str) -> PeerReport | None:
        """Return what this pod knows; with ``wait=8`` once a pod is silent, or after that time.

        ``silent=5``: a peer reports that pod 5 is.
        """
        if path != _PATH:
            return None
        hint = _HINT.fullmatch(query)
        if hint:
            self.take_hint(int(hint[1]))
            return PeerReport(pod=self._pod.node)
        wait = _WAIT.fullmatch(query)
        return self.report_peers(float(wait[1]) if wait else 0.0)

    def report_peers(self, seconds: float) -> PeerReport:
        """Return what this pod knows, after at most ``seconds``: at once if a peer is silent. Any thread calls this.

        Who does not wait suspects a peer: all are probed soon.
        """
        deadline = time.monotonic() + min(seconds, _LONGEST_WAIT)
        with self._changed:
            for peer in self._peers if not seconds else ():
                peer.due = min(peer.due, peer.checked + _INTERVAL_OF_SUSPECT)
            while not self.has_news():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            now = self._clock.read(time.monotonic())
            contacts = tuple(_describe(peer, now) for peer in self._peers if peer.has_answered)
            return PeerReport(pod=self._pod.node, contacts=contacts, hints=self._list_hints())

    def has_news(self) -> bool:
        """Return whether a peer is silent, or reported as silent."""
        return bool(self._list_hints()) or any(peer.silent_since is not None for peer in self._peers)

    def _list_hints(self) -> tuple[int, ...]:
        now = time.monotonic()
        return tuple(sorted(pod for pod, since in self._hints.items() if now - since < _HINT_SECONDS))

    def _tick(self) -> float:
        return self._clock.tick(time.monotonic())


def _describe(peer: _Peer, now: float) -> PeerContact:
    silence = None if peer.silent_since is None else max(0.0, now - peer.silent_since)
    return PeerContact(pod=peer.index, silent_seconds=silence)


def list_probed_peers(pod: Pod) -> Sequence[int]:
    """Return the indexes of the peers that a pod probes; none under `ddp run`, on one machine."""
    if not pod.is_multi_node or pod.local or not pod.metrics_port or not pod.pod_host:
        return ()
    pods = count_pods(pod)
    return [(pod.node + step) % pods for step in choose_peer_steps(pods)]


def count_pods(pod: Pod) -> int:
    """Return the number of the job's pods, in an elastic job at most."""
    return max(pod.nodes + pod.spares, pod.max_nodes)


def resolve_host(host: str) -> Address | None:
    """Return the address of a host; None if it does not exist. Raises: OSError if no name server responds."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            return None
        raise
    return Address(family, str(address[0]))


def probe_port(address: Address, port: int) -> bool:
    """Return whether a machine answers at a port, also by refusing the connection."""
    with socket.socket(address.family, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        try:
            connection.connect((address.host, port))
        except OSError as error:
            return error.errno in _REFUSED
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return True


def send_hint(address: Address, port: int, silent: int) -> None:
    """Report to a pod that another one is silent. Raises: OSError."""
    request_page(address, port, f"{_PATH}?silent={silent}")


def request_page(address: Address, port: int, target: str) -> bool:
    """Request a page of a pod's launcher; return whether it starts to respond. Raises: OSError."""
    with socket.socket(address.family, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect((address.host, port))
        connection.sendall(f"GET {target} HTTP/1.1\r\n\r\n".encode())
        return bool(connection.recv(1))
