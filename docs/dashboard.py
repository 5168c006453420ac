"""The picture of a Grafana dashboard in the docs: a dashboard's JSON, a real Prometheus, and Grafana's own components.

    python -m docs.dashboard --prometheus http://127.0.0.1:9090 --from 1795600000 --to 1795601800 \
        --rows Progress,Learning,Speed job namespace=team ddp_job=gpt

docs/grafana has the page that draws it, built with npm into build/grafana; a headless Chromium takes the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import io
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
WIDTH = 1600


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def build_page() -> Path:
    """Build the page and return its folder."""
    source = ROOT / "build" / "grafana"
    shutil.copytree(DOCS / "grafana", source, dirs_exist_ok=True)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=source, check=True)
    subprocess.run(["npx", "vite", "build"], cwd=source, check=True)
    site = source / "dist"
    shutil.copytree(source / "node_modules/@grafana/ui/dist/public/img", site / "build" / "img")
    shutil.copytree(
        ROOT / "deploy" / "monitoring" / "dashboards",
        site / "boards",
        ignore=shutil.ignore_patterns("*.py", "__pycache__"),
    )
    return site


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and return its address."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def photograph(url: str, profile: str) -> bytes:
    """Return the PNG of a page, in its whole height, when its title is ``drawn``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--remote-debugging-port={port}", f"--user-data-dir={profile}", f"--window-size={WIDTH},4000", url]
    browser = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        async with aiohttp.ClientSession() as session:
            page = await find_page(session, port, url)
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as protocol:
                while await evaluate(protocol, "document.title") != "drawn":  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                height = await evaluate(protocol, "document.querySelector('.board').scrollHeight")
                clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
                shot = await call(protocol, "Page.captureScreenshot", clip=clip)
                return base64.b64decode(shot["data"])
    finally:
        browser.terminate()
        await browser.wait()


async def find_page(session: aiohttp.ClientSession, port: int, url: str) -> dict[str, Any]:
    """Return the browser's description of the page when it exists."""
    while True:
        try:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [page for page in await answer.json() if page["url"] == url]
        except aiohttp.ClientConnectionError:
            pages = []
        if pages:
            return dict(pages[0])
        await asyncio.sleep(0.2)


async def evaluate(protocol: aiohttp.ClientWebSocketResponse, expression: str) -> Any:
    """Return the value of an expression in the page."""
    return (await call(protocol, "Runtime.evaluate", expression=expression))["result"].get("value")


async def call(protocol: aiohttp.ClientWebSocketResponse, method: str, **parameters: Any) -> dict[str, Any]:
    """Call a method of the browser's protocol and return its result."""
    await protocol.send_json({"id": 1, "method": method, "params": parameters})
    answer = await protocol.receive_json()
    return dict(answer["result"])


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m docs.dashboard")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--from", required=True, type=int, dest="start", metavar="SECONDS", help="Unix time")
    parser.add_argument("--to", required=True, type=int, dest="end", metavar="SECONDS", help="Unix time")
    parser.add_argument("--scrape", default=15, type=int, metavar="SECONDS", help="interval of the scrapes")
    parser.add_argument("--rows", required=True, metavar="A,B", help="rows of the dashboard")
    parser.add_argument("board", help="job, fleet or operator")
    parser.add_argument("variables", nargs="*", metavar="NAME=VALUE", help="values of the dashboard's variables")
    return parser.parse_args()


def main() -> None:
    """Draw the dashboard that the command line names."""
    from PIL import Image

    arguments = parse_arguments()
    options = {
        "board": arguments.board,
        "prometheus": arguments.prometheus,
        "from": arguments.start,
        "to": arguments.end,
        "scrape": arguments.scrape,
        "rows": arguments.rows,
        **{f"var-{name}": value for name, _, value in (entry.partition("=") for entry in arguments.variables)},
    }
    site = build_page()
    with serve(site) as address, tempfile.TemporaryDirectory() as profile:
        shot = asyncio.run(photograph(f"{address}/index.html?{urlencode(options)}", profile))
    picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(128)
    picture.save(DOCS / "images" / f"dashboard-{arguments.board}.png", optimize=True)


if __name__ == "__main__":
    main()
