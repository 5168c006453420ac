"""Where orders arrive: a socket in the runtime folder of pod 0, and the program that passes an order on to it.

`ddp rerun` starts the program in the container (``launcher.py order``). Who may do that may do anything else there too,
so the socket needs no other protection than its folder, which only this user can enter.
"""

import asyncio
import glob
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from ...base.pod_setup import list_temporary_folders
from ...contract.names import ENV_RUNTIME_DIR
from .contract import ORDER_LIMIT, Event, Order, decode_order, encode_event

_NAME: Final = "orders.sock"
_SECONDS_TO_SEND: Final = 600.0  # of the archive
_PIECE: Final = 1 << 20


class OrderStream:
    """An order's connection: what remains of its archive, and its events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._began = asyncio.get_running_loop().time()
        self.over = asyncio.Event()  # set after the last event

    async def save_archive(self, path: str, size: int) -> None:
        """Write the archive to a file. Raises: OSError, EOFError if the sender has gone."""
        with open(path, "wb") as file:
            while size:
                piece = await asyncio.wait_for(self._reader.read(min(size, _PIECE)), _SECONDS_TO_SEND)
                if not piece:
                    raise EOFError
                file.write(piece)
                size -= len(piece)

    def send(self, kind: str, **values: Any) -> None:
        """Send an event, if the sender of the order still listens."""
        seconds = asyncio.get_running_loop().time() - self._began
        if not self._writer.is_closing():
            self._writer.write(encode_event(Event(kind, seconds=round(seconds, 3), **values)))


async def listen(folder: str, carry_out: Callable[[Order, OrderStream], Awaitable[None]]) -> asyncio.AbstractServer:
    """Accept orders. The stream of an order is closed when ``carry_out`` returns or raises an exception."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = OrderStream(reader, writer)
        try:
            await _serve(reader, stream, carry_out)
            await writer.drain()
        except OSError:
            pass  # the sender has gone
        except Exception:
            message = "internal error of the pod's holder; the log of pod 0 has a traceback"
            stream.send("refused", message=message, remedy="please report it")
            raise  # the event loop logs it
        finally:
            writer.close()  # or the sender would wait for ever

    with _open_folder(folder) as path, suppress(FileNotFoundError):
        os.unlink(path)
    with _open_folder(folder) as path:
        return await asyncio.start_unix_server(accept, path, limit=ORDER_LIMIT)


async def _serve(
    reader: asyncio.StreamReader, stream: OrderStream, carry_out: Callable[[Order, OrderStream], Awaitable[None]]
) -> None:
    try:
        order = decode_order(await reader.readline())
    except ValueError as error:
        stream.send("refused", message=str(error), remedy="use a `ddp` of the operator's version")
        return
    await carry_out(order, stream)


@contextmanager
def _open_folder(folder: str) -> Iterator[str]:
    """Yield a path of the socket within the 108 bytes that its address may have."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_NAME}"
    finally:
        os.close(descriptor)


def main(argv: Sequence[str] = ()) -> int:
    """Pass the order in standard input on to the holder of this pod, and print its events. Returns the exit code."""
    channel = _connect()
    if channel is None:
        refusal = Event(
            "refused",
            message="no process of this pod takes orders",
            remedy="start the job with `ddp dev`; only pod 0 takes orders, and only while it runs",
        )
        sys.stdout.buffer.write(encode_event(refusal))
        return 1
    line = sys.stdin.buffer.readline()
    size = decode_order(line).size
    with suppress(OSError):  # the holder refuses an order without its archive
        channel.sendall(line)
        while size:
            piece = sys.stdin.buffer.read(min(size, _PIECE))
            if not piece:
                return 1  # the sender has gone; the holder then changes nothing
            channel.sendall(piece)
            size -= len(piece)
    with suppress(ConnectionResetError):
        while events := channel.recv(_PIECE):
            sys.stdout.buffer.write(events)
            sys.stdout.buffer.flush()
    return 0


def _connect() -> socket.socket | None:
    """Return a connection to the holder; None if there is none."""
    parents = list_temporary_folders()
    folders = [path for parent in parents for path in glob.glob(os.path.join(glob.escape(parent), "ddp-*"))]
    for folder in filter(None, (os.environ.get(ENV_RUNTIME_DIR), *folders)):
        with suppress(OSError):
            if os.lstat(folder).st_uid != os.getuid():
                continue
            channel = socket.socket(socket.AF_UNIX)
            with _open_folder(folder) as path:
                channel.connect(path)
            return channel
    return None
