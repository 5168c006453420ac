"""The socket on which pod 0 of `ddp dev` takes orders."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ddp_pod.features.dev.contract import Event, Order, decode_event, encode_order
from ddp_pod.features.dev.orders import OrderStream, listen

SOON = 60.0


@asynccontextmanager
async def sent(folder: Path, line: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Send a line to the socket of a folder."""
    before = os.getcwd()
    os.chdir(folder)  # its path may be longer than an address
    try:
        reader, writer = await asyncio.open_unix_connection("orders.sock")
    finally:
        os.chdir(before)
    writer.write(line)
    try:
        yield reader
    finally:
        writer.close()


async def read_events(folder: Path, line: bytes) -> list[Event]:
    """Return all events until the stream is closed."""
    async with sent(folder, line) as reader, asyncio.timeout(SOON):
        return [decode_event(text) for text in (await reader.read()).splitlines()]


@pytest.mark.parametrize("error", [RuntimeError("a mistake of ours"), ValueError("of a library")])
async def test_unexpected_error_of_an_order_is_reported_and_closes_the_stream(tmp_path: Path, error: Exception) -> None:
    logged = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context.get("exception")))

    async def fail(order: Order, stream: OrderStream) -> None:
        raise error

    server = await listen(str(tmp_path), fail)
    (event,) = await read_events(tmp_path, encode_order(Order("run")))
    assert event.kind == "refused"
    assert "internal error" in event.message
    assert logged == [error], "with its traceback"
    server.close()


@pytest.mark.parametrize("line", [b"no order\n", b"{}\n", b'{"kind": "other"}\n'])
async def test_line_that_is_no_order_is_refused(tmp_path: Path, line: bytes) -> None:
    async def carry_out(order: Order, stream: OrderStream) -> None:
        raise AssertionError("it is no order")

    server = await listen(str(tmp_path), carry_out)
    (event,) = await read_events(tmp_path, line)
    assert event.kind == "refused"
    server.close()
