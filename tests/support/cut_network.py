"""A write into an interrupted network: a program that prints what the server received after the repair.

Run as ``unshare --user --map-root-user --net --fork --kill-child python cut_network.py [SECONDS]``. The network is the
loopback of a separate namespace. SECONDS is the client's ``unheard``. With it, the network is repaired once the kernel
has discarded the undelivered data, without it at once.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import kopf
from aiohttp import web

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.kube.client import ApiClient

PATIENCE: Final = 120.0
CALL: Final = 0.5
"""Seconds after which the client abandons the interrupted call."""


def is_being_sent(port: int) -> bool:
    """Return whether the kernel has unacknowledged data for this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].endswith(f":{port:04X}") and int(row[4].partition(":")[0], 16) for row in rows)


async def until(probe: Callable[[], bool], event: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                if probe():
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise SystemExit(f"never happened: {event}") from None


async def run(*command: str, text: str = "") -> None:
    await asyncio.to_thread(subprocess.run, command, input=text, text=True, check=True)


async def main(unheard: float | None) -> list[str]:
    received: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        received.append(f"{request.method} {request.path}")
        return web.json_response({})

    await run("ip", "link", "set", "lo", "up")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]

    async def log_in() -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=f"http://127.0.0.1:{port}")

    client = ApiClient(log_in, timeout=PATIENCE, unheard=unheard)
    await client.request("GET", "/before")
    rules = f"table inet cut {{\nchain in {{\ntype filter hook input priority 0\ntcp dport {port} drop\n}}\n}}\n"
    await run("nft", "-f", "-", text=rules)
    client._timeout = CALL
    try:
        await client.request("POST", "/late", body={})
    except ClusterError:
        pass
    else:
        raise SystemExit("the network was not cut")
    if unheard is not None:
        await until(lambda: not is_being_sent(port), "the kernel lets go of the call")
    elif not is_being_sent(port):
        raise SystemExit("the kernel has let go of the call by itself")
    client._timeout = PATIENCE
    await run("nft", "delete table inet cut")
    await until(lambda: not is_being_sent(port), "the kernel has delivered what it had")
    await client.request("GET", "/after")
    await client.close()
    await runner.cleanup()
    return received


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(float(sys.argv[1]) if sys.argv[1:] else None))))
