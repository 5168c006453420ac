"""`ddp ui`: pages about the jobs of a cluster and the runs of this machine, in the browser of this user."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from ddp_cli.client.errors import ClientError
from ddp_cli.commands.arguments import add_cluster_arguments, add_history_argument, add_local_arguments, has_cluster
from ddp_cli.commands.io import CommandError, ExitCode, integer, print_note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="show the jobs of all namespaces")
    parser.add_argument("--no-browser", action="store_true", help="only print the address, as for an SSH tunnel")
    parser.add_argument(
        "--port", type=integer(0, 65535), default=0, metavar="N", help="port on 127.0.0.1; default: a free one"
    )
    add_local_arguments(parser, named=False)
    add_history_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = "The pages change nothing. Ctrl-C ends them."


def run(arguments: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C. Raises: CommandError."""
    try:
        import aiohttp  # noqa: F401
        import jinja2  # noqa: F401
    except ImportError as error:
        raise CommandError(f"{error}; install ddp with its extra ui") from None
    asyncio.run(_serve(arguments))
    return ExitCode.OK


async def _serve(arguments: argparse.Namespace) -> None:
    from aiohttp import web

    from ddp_cli.features.ui.server import Server

    loop = asyncio.get_running_loop()
    server: Server

    def on_change() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(server.notify)

    sources = await asyncio.to_thread(_open_sources, arguments, on_change)
    places = " · ".join(sources)
    server = Server(list(sources.values()), places)
    for source in sources.values():
        source.start()
    runner = web.AppRunner(server.build(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", arguments.port).start()
    except OSError as error:
        raise CommandError(f"--port {arguments.port}: {os.strerror(error.errno or 0)}; choose another port") from None
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/?token={server.token}"
    first = asyncio.create_task(server.refresh())
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # before the address, after which a program may end this one
        loop.add_signal_handler(number, ended.set)
    with tempfile.TemporaryDirectory(prefix="ddp-ui-", ignore_cleanup_errors=True) as folder:
        print(address, flush=True)  # ours, with its secret
        print_note(f"shows {places}; Ctrl-C ends it")
        if not arguments.no_browser and not await asyncio.to_thread(open_browser, address, Path(folder)):
            print_note("no browser was found here; open the address, or through a tunnel: ssh -L PORT:127.0.0.1:PORT")
        await ended.wait()
    first.cancel()
    await runner.cleanup()


def _open_sources(arguments: argparse.Namespace, on_change: Callable[[], None]) -> dict[str, Any]:
    """Return the places that the arguments name, each by its description. Raises: CommandError, ClientError."""
    from ddp_cli.client.api import Api, connect
    from ddp_cli.features.ui.records import RecordedJobs
    from ddp_cli.features.ui.sources import ClusterJobs, LocalRuns

    everywhere = arguments.all_namespaces
    namespace = None if everywhere else arguments.namespace

    def login() -> Api:
        return connect(namespace=namespace, context=arguments.context, kubeconfig=arguments.kubeconfig)

    sources: dict[str, Any] = {}
    if not arguments.local and has_cluster(arguments):
        api = login()
        namespace = None if everywhere else api.namespace
        place = f"namespace {namespace}" if namespace else "all namespaces"
        sources[f"{place} of {api.host}"] = ClusterJobs(api, everywhere=everywhere, on_change=on_change)
    elif everywhere:
        raise CommandError("-A shows the jobs of a cluster, and no cluster is configured; use --kubeconfig")
    sources[f"runs in {arguments.runs_dir}"] = LocalRuns(arguments.runs_dir)
    if arguments.history:
        records = RecordedJobs(arguments.history, namespace or "", login, arguments.history_image, on_change)
        sources[f"records in {arguments.history}"] = records
    return sources


def open_browser(address: str, folder: Path) -> bool:
    """Open the address in the user's browser; return whether one was started.

    A file in a ``folder`` that only the user may read leads there: other users see the arguments of processes.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        if not os.environ.get("BROWSER"):
            return False
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0;url={escape(address)}">', encoding="utf-8")
    try:
        return webbrowser.open(page.as_uri())
    except (webbrowser.Error, OSError) as error:
        raise ClientError(f"the browser cannot be opened ({error}); use --no-browser") from None
