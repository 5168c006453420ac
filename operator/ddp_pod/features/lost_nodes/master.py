"""The move of pod 0 to another address: its node was lost, and the connection to its store does not break by itself.

A machine without power or network acknowledges nothing. That of a frozen pod does, so its launcher is asked for a
response now and then; while there is none, the name of pod 0 is looked up.
"""

import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from ...base.files import log
from ...base.pod import Pod
from ...base.service import Control, Service
from ...failures.agent_failure import build_move_failure
from ...network.connections import Connection, list_servers, list_unacknowledged
from .peers import TIMEOUT, Address, request_page, resolve_host

_INTERVAL: Final = 2.0
_INTERVAL_OF_SILENT: Final = 0.5
_SECONDS_PER_TEST: Final = 5.0  # between two requests of a pod to the launcher of pod 0
_PODS_PER_SECOND: Final = 50  # in a large job, from all its pods
_SECONDS_TO_LOOK: Final = 90.0  # after the last response, for which the name is looked up again and again


class MasterWatch(Service):
    """Restarts the agent when pod 0 does not acknowledge or does not respond, and another pod 0 serves the store.

    Both must be true: pod 0 may only be slow, and its name changes while it still trains with its peers.
    """

    name = "master watch"

    def __init__(
        self,
        pod: Pod,
        *,
        resolve: Callable[[str], Address | None] | None = None,
        accepts: Callable[[Address, int], bool] | None = None,
        responds: Callable[[Address, int], bool] | None = None,
    ) -> None:
        self._pod = pod
        self._resolve = resolve or resolve_host
        self._accepts = accepts or accepts_connection
        self._responds = responds or responds_to_request
        self._tested_at = time.monotonic()
        self._responded_at: float | None = None
        self._is_frozen = False
        self._control: Control | None = None
        self._is_silent = False
        self._seen_at = ""
        self._moved_to = ""

    def start(self, control: Control) -> None:
        """Keep the access to the agent."""
        self._control = control

    def run(self) -> None:
        """Check the connections to the store continuously."""
        while self._pod.node != 0:
            time.sleep(_INTERVAL_OF_SILENT if self._is_silent or self._is_frozen else _INTERVAL)
            self.check(list_unacknowledged())
            self.check_response(list_servers(self._pod.port), time.monotonic())

    def check_response(self, servers: Collection[str], now: float) -> None:
        """Note where pod 0 is now, if its launcher does not respond and its name has changed.

        ``servers``: the addresses to which this pod's connections to the store lead. The launcher at the new address
        has to respond, so that no NetworkPolicy keeps this pod from such responses. A launcher that has never responded
        is asked no more often than others: its response may be forbidden.
        """
        port = self._pod.metrics_port
        if not servers or not port:
            return
        is_due = now - self._tested_at >= max(_SECONDS_PER_TEST, self._pod.nodes / _PODS_PER_SECOND)
        # First the successor: a request to the frozen pod takes two seconds.
        if self._is_frozen and (is_due or self._has_responded_lately(now)):
            self._look_up(servers, port)
        if is_due and not self._moved_to:
            self._test(servers, port, now)

    def _test(self, servers: Collection[str], port: int, now: float) -> None:
        """Find out whether the launcher of pod 0 responds."""
        self._tested_at = now
        old = [Address(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in servers]
        is_silent = not any(self._responds(host, port) for host in old)
        if not is_silent:
            self._responded_at = now
        elif self._responded_at is not None and not self._is_frozen:
            log("the launcher of pod 0 does not respond: its node may be frozen")
        self._is_frozen = is_silent

    def _has_responded_lately(self, now: float) -> bool:
        return self._responded_at is not None and now - self._responded_at < _SECONDS_TO_LOOK

    def _look_up(self, servers: Collection[str], port: int) -> None:
        with suppress(OSError):
            address = self._resolve(self._pod.master)
            if address is None or address.host in servers:
                return
            if address.host != self._seen_at:
                self._seen_at = address.host
                log(f"the name of pod 0 leads to another address, {address.host}")
            if self._accepts(address, self._pod.port) and self._responds(address, port):
                self._note_move(address)

    def check(self, connections: Sequence[Connection]) -> None:
        """Note where pod 0 is now, if it does not acknowledge requests to the store."""
        silent = {connection.address for connection in connections if connection.port == self._pod.port}
        self._is_silent = bool(silent)
        if not silent or self._control is None:
            return
        with suppress(OSError):
            address = self._resolve(self._pod.master)
            if address is not None and address.host not in silent and self._accepts(address, self._pod.port):
                self._note_move(address)

    def _note_move(self, address: Address) -> None:
        if self._control is not None:
            self._moved_to = address.host
            self._control.wake()

    def follow(self, ready: Sequence[object]) -> None:
        """Restart the agent if pod 0 has moved."""
        if self._moved_to and self._control is not None:
            log(f"pod 0 was replaced: its rendezvous store is at {self._moved_to} now")
            self._control.restart_agent(build_move_failure(self._pod, self._moved_to))
            self._moved_to = ""


def accepts_connection(address: Address, port: int) -> bool:
    """Return whether a server accepts connections."""
    with socket.socket(address.family, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT)
        return connection.connect_ex((address.host, port)) == 0


def responds_to_request(address: Address, port: int) -> bool:
    """Return whether a launcher responds to a request for its health."""
    try:
        return request_page(address, port, "/healthz")
    except OSError:
        return False
