"""The holders of the other pods: pod 0 connects to each of them, and they do what it asks.

Requests: ``state``, ``code`` (pieces of an archive follow), ``send`` (pieces are the reply), ``stop``, ``start``,
``hold``, ``spare``, ``release``. A peer reports the end of a run unasked. All values are JSON.
"""

import asyncio
import dataclasses
import itertools
import os
import socket
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final

from ...base.files import log
from ...base.pod import Pod
from ...contract import records
from ...contract.plan import from_json, to_json
from ...contract.pod_end import PodEnd
from .background import run_in_background
from .contract import MOST_CODE_BYTES
from .link import PIECE, Link, LinkBroken, open_link
from .processes import RunEnd
from .runs import PodRuns, RunPlan

_SECONDS_TO_CONNECT: Final = 5.0
_SHORTEST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
_MOST_STRANGERS: Final = 16
_SECONDS_UNHEARD: Final = 10
_SECONDS_BETWEEN_PROBES: Final = 2


@dataclasses.dataclass
class PeerState:
    """What pod 0 knows of a peer. ``end``: of its part of the run; None while it runs, or if it never ran.

    ``spare``: whether it has only noted the run.
    """

    plan: RunPlan
    running: bool
    end: RunEnd | None = None
    spare: bool = False


def encode_state(runs: PodRuns) -> dict[str, Any]:
    """Return the state of this pod's runs as JSON."""
    state = {"running": runs.is_running, "end": _encode_end(runs.end), "spare": runs.is_spare}
    return {**to_json(runs.plan), **state}


def _decode_state(message: dict[str, Any]) -> PeerState:
    """Read what ``encode_state`` returns."""
    end = _decode_end(message["end"])
    return PeerState(from_json(RunPlan, message), bool(message["running"]), end, bool(message.get("spare")))


def _encode_end(end: RunEnd | None) -> dict[str, Any] | None:
    return None if end is None else {"code": end.code, "end": records.to_json(end.end)}


def _decode_end(raw: Any) -> RunEnd | None:
    return None if raw is None else RunEnd(int(raw["code"]), records.read_record(PodEnd, raw["end"]))


class Peer:
    """Pod 0's side. ``state`` is None while there is no connection."""

    def __init__(self, pod: Pod, index: int, on_state: Callable[["Peer"], Coroutine[Any, Any, None]]) -> None:
        self.index = index
        self.state: PeerState | None = None
        self.seen = asyncio.Event()
        self._pod = pod
        self._on_state = on_state
        self._link: Link | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._file: Any = None  # which receives the pieces of an archive

    async def follow(self) -> None:
        """Keep a connection to the peer, whatever it sends: without one, pod 0 refuses all orders."""
        pause = _SHORTEST_PAUSE
        while True:
            try:
                await self._connect()
                pause = _SHORTEST_PAUSE
                await self._serve()
            except (LinkBroken, OSError, TimeoutError, asyncio.TimeoutError):
                pause = min(_LONGEST_PAUSE, 1.5 * pause)
            except Exception as error:  # from a holder of another version, or a mistake of ours
                log(f"the connection to pod {self.index} is opened again: {error!r}")
                pause = _LONGEST_PAUSE
            finally:
                self._disconnect()
            await self._on_state(self)
            await asyncio.sleep(pause)

    async def _connect(self) -> None:
        host = dataclasses.replace(self._pod, node=self.index).address
        connected = asyncio.open_connection(host, self._pod.port)
        reader, writer = await asyncio.wait_for(connected, _SECONDS_TO_CONNECT)
        _notice_silence(writer.get_extra_info("socket"))
        opening = open_link(reader, writer, self._pod.secret, self._pod.run_id, caller=True)
        self._link = await asyncio.wait_for(opening, _SECONDS_TO_CONNECT)

    def _disconnect(self) -> None:
        self.state = None
        if self._link is not None:
            self._link.close()
            self._link = None
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(LinkBroken(f"pod {self.index} has gone"))
        self._replies.clear()

    async def _serve(self) -> None:
        reading = asyncio.create_task(self._read())
        greeting = asyncio.create_task(self._greet())
        try:
            await reading
        finally:
            reading.cancel()
            greeting.cancel()

    async def _greet(self) -> None:
        with suppress(LinkBroken):
            await self.request("state")
            self.seen.set()
            await self._on_state(self)

    async def _read(self) -> None:
        assert self._link is not None
        while True:
            message, body = await self._link.receive()
            if body:
                self._file.write(body)
                continue
            if "run" in message:
                self.state = _decode_state(message)
            if "id" in message:
                self._replies.pop(message["id"]).set_result(message)
            else:
                run_in_background(self._on_state(self))

    async def request(self, kind: str, **values: Any) -> dict[str, Any]:
        """Send a request. Returns the reply. Raises: LinkBroken."""
        return await self._request({"kind": kind, **values})

    async def _request(self, message: dict[str, Any], pieces: Iterable[bytes] = ()) -> dict[str, Any]:
        """Send a request and what follows it. Returns the reply. Raises: LinkBroken."""
        if self._link is None:
            raise LinkBroken(f"pod {self.index} cannot be reached")
        number = next(self._numbers)
        reply = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        await self._link.send({"id": number, **message})
        for piece in pieces:
            await self._link.send({}, piece)
        answer: dict[str, Any] = await reply
        return answer

    async def start(self, plan: RunPlan, *, hold: bool = False) -> None:
        """Start a run in the pod; ``hold``: only note it as the newest. Raises: LinkBroken."""
        await self.request("hold" if hold else "start", **to_json(plan))

    async def note_as_spare(self, plan: RunPlan) -> None:
        """Make the pod a spare of a run that it does not start yet. Raises: LinkBroken."""
        await self.request("spare", **to_json(plan))

    async def send_code(self, path: str, digest: str) -> None:
        """Send the archive of a digest. Raises: LinkBroken, OSError."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = iter(lambda: file.read(PIECE), b"")
            reply = await self._request({"kind": "code", "digest": digest, "size": size}, pieces)
        problem = reply.get("problem")
        if problem:
            raise LinkBroken(f"pod {self.index}: {problem}")

    async def fetch_code(self, path: str, digest: str) -> None:
        """Receive the archive of a digest into a file. Raises: LinkBroken, OSError."""
        with open(path, "wb") as self._file:
            await self.request("send", digest=digest)


def _notice_silence(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other machine has gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    unheard = (_SECONDS_UNHEARD - _SECONDS_BETWEEN_PROBES) // _SECONDS_BETWEEN_PROBES
    options = {
        "TCP_KEEPIDLE": _SECONDS_BETWEEN_PROBES,
        "TCP_KEEPINTVL": _SECONDS_BETWEEN_PROBES,
        "TCP_KEEPCNT": unheard,
        "TCP_USER_TIMEOUT": 1000 * _SECONDS_UNHEARD,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system that `ddp run` is used on
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class PeerServer:
    """The side of the other pods."""

    def __init__(self, pod: Pod, runs: PodRuns, release: Callable[[], None]) -> None:
        self._pod = pod
        self._runs = runs
        self._release = release
        self._link: Link | None = None
        self._strangers: list[asyncio.StreamWriter] = []  # the oldest first

    async def listen(self) -> asyncio.AbstractServer:
        """Accept connections of pod 0 on this pod's rendezvous port, which only pod 0 needs itself."""
        host = self._pod.address if self._pod.local else None
        return await asyncio.start_server(self._accept, host, self._pod.port, family=socket.AF_UNSPEC)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link, message = await self._admit(reader, writer)
            self._link = link  # of the newest pod 0
            await self._serve(link, message)
        except (LinkBroken, asyncio.TimeoutError):
            pass  # pod 0 connects again
        finally:
            writer.close()  # after any other error too, as pod 0 waits for a reply

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Link, dict[str, Any]]:
        """Return the link of pod 0 and its first request, which proves who it is. Raises: LinkBroken, TimeoutError."""
        if len(self._strangers) >= _MOST_STRANGERS:
            self._strangers.pop(0).close()  # the oldest rather than the newest, which may be pod 0
        self._strangers.append(writer)
        try:
            opening = open_link(reader, writer, self._pod.secret, self._pod.run_id, caller=False)
            link = await asyncio.wait_for(opening, _SECONDS_TO_CONNECT)
            message, _ = await asyncio.wait_for(link.receive(), _SECONDS_TO_CONNECT)
        finally:
            if writer in self._strangers:
                self._strangers.remove(writer)
        return link, message

    async def _serve(self, link: Link, message: dict[str, Any]) -> None:
        """Do what pod 0 asks, from its first request on. Raises: LinkBroken."""
        while True:
            reply = await self._do(link, message)
            await link.send({**reply, "id": message["id"]})
            if message["kind"] == "release":
                self._release()
            message, _ = await link.receive()

    async def report_end(self) -> None:
        """Tell pod 0 how the run has ended here."""
        if self._link is not None:
            with suppress(LinkBroken):  # the next pod 0 asks for the state
                await self._link.send(encode_state(self._runs))

    async def _do(self, link: Link, message: dict[str, Any]) -> dict[str, Any]:
        """Do what pod 0 asks. Returns the reply. Raises: LinkBroken."""
        match message["kind"]:
            case "code":
                return await self._receive_code(link, str(message["digest"]), int(message["size"]))
            case "send":
                await self._send_code(link, str(message["digest"]))
            case "stop":
                await self._runs.stop()
            case "start":
                plan = from_json(RunPlan, message)
                if not (self._runs.is_running and self._runs.plan == plan):  # an older state may have crossed it
                    await self._runs.stop()
                    await self._runs.start(plan)
            case "hold":
                await self._runs.stop()
                self._runs.adopt(from_json(RunPlan, message))
            case "spare":
                await self._runs.stop()
                self._runs.wait_as_spare(from_json(RunPlan, message))
        return encode_state(self._runs)

    async def _receive_code(self, link: Link, digest: str, size: int) -> dict[str, Any]:
        """Receive the pieces of an archive. Their frames are signed, and pod 0 has checked the archive."""
        path = os.path.join(self._pod.runtime, "receiving")
        problem = "" if size <= MOST_CODE_BYTES else "the archive is too long"
        received = 0
        with open(path, "wb") as file:
            while received < size:
                _, piece = await link.receive()
                received += len(piece)
                if problem:
                    continue
                try:
                    file.write(piece)
                except OSError as error:
                    problem = f"cannot write {path}: {error.strerror}"
        if problem:
            os.unlink(path)
            log(f"code {digest[:12]} was not received: {problem}")
            return {"problem": problem}
        self._runs.keep_code(path, digest, checked=True)
        return {}

    async def _send_code(self, link: Link, digest: str) -> None:
        with suppress(OSError), open(self._runs.archive_of(digest), "rb") as file:
            while piece := file.read(PIECE):
                await link.send({}, piece)
