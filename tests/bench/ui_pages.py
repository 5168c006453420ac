"""Measure the pages of `ddp ui`: 200 jobs, a job of 1,000 ranks, the delay of a change, and the CPU time while idle.

``python -m tests.bench.ui_pages``; with Chromium also the first paint of the list, and of a page of one sentence.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from ddp_cli.local.folder import RunFolder
from ddp_operator.api.kubeobjects import utc_now
from tests.support.browser import Browser, explain_missing
from tests.support.builders import page as build_report
from tests.support.builders import resource

JOBS = 200
RANKS = 1000
IDLE_SECONDS = 30.0
POINTS = ["time,step,loss", *(f"{n},{n},{2 / (n + 1):.3f}" for n in range(60))]


def make_runs(folder: Path) -> RunFolder:
    """Make the runs; return the one with many ranks."""
    for number in range(JOBS):
        run = RunFolder.create(folder, f"job-{number}", utc_now())
        status = {"phase": "Failed" if number % 9 == 0 else "Succeeded", "attempt": 1, "points": POINTS}
        run.write_status(resource() | {"status": status})
    for pod in range(RANKS // 8):
        counters = {"steps": 10, "step": 10, "stepSeconds": 2.0, "dataSeconds": 0.1, "computeSeconds": 1.0}
        ranks = [{"rank": 8 * pod + n, **counters} for n in range(8)]
        run.write(run.reports / f"attempt-1-pod-{pod}.json", build_report(ranks=ranks))
    run.write_manifest("", (), resource(), "ddp run")  # this process holds its lock: the run is under way
    run.write_status(resource() | {"status": {"phase": "Running", "attempt": 1, "points": POINTS}})
    return run


class Client:
    """A browser's requests."""

    def __init__(self, address: str) -> None:
        self._base, _, token = address.partition("/?token=")
        self._cookie = f"ddp-ui-{self._base.rpartition(':')[2]}={token}"

    def open(self, path: str) -> Any:
        return urlopen(Request(self._base + path, headers={"Cookie": self._cookie}), timeout=60)

    def measure(self, path: str) -> tuple[float, int]:
        """Return the median seconds of a page, and its bytes."""
        times = []
        for _ in range(7):
            began = time.perf_counter()
            with self.open(path) as response:
                size = len(response.read())
            times.append(time.perf_counter() - began)
        return median(times), size


def read_event(stream: Any) -> Any:
    for line in stream:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream has ended")


def measure_delay(client: Client, run: RunFolder) -> float:
    """Return the median seconds from a change of a run's file until the list has it."""
    delays = []
    with client.open("/events") as stream:
        read_event(stream)
        for step in range(10):
            time.sleep(0.7)
            run.write_status(resource() | {"status": {"phase": "Running", "attempt": 1, "progress": {"step": step}}})
            began = time.perf_counter()
            read_event(stream)
            delays.append(time.perf_counter() - began)
    return median(delays)


def measure_idle(client: Client, pid: int) -> float:
    """Return the share of one CPU that the server uses while a list is open and nothing changes."""
    with client.open("/events") as stream:
        read_event(stream)
        before = read_cpu(pid)
        time.sleep(IDLE_SECONDS)
        return (read_cpu(pid) - before) / IDLE_SECONDS


def read_cpu(pid: int) -> float:
    """Return the CPU seconds of a process as its scheduler counts them: samples at clock ticks miss short work."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def measure_paint(address: str, folder: Path) -> tuple[float, float]:
    """Return the median milliseconds until Chromium paints the list, and a page of one sentence."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    times: dict[str, list[float]] = {"": [], "nowhere": []}
    base, _, _ = address.partition("?")
    async with Browser("chromium", folder) as browser:
        await browser.resize(1240, 900)
        await browser.go(address)
        await browser.until(f"document.querySelectorAll('#rows tr').length === {JOBS}")
        for _ in range(9):
            for path, found in times.items():
                await browser.go("about:blank")
                await browser.until("location.protocol === 'about:'")
                await browser.go(base + path)
                found.append(await browser.until(f"location.pathname === '/{path}' && {paint}"))
    return median(times[""]), median(times["nowhere"])


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        runs = Path(scratch, "ddp-runs")
        many = make_runs(runs)
        command = [sys.executable, "-m", "ddp_cli", "ui", "--local", "--no-browser", "--runs-dir", str(runs)]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            client = Client(address)
            print(f"start until the address is printed: {time.perf_counter() - began:.2f} s")
            with client.open("/events") as stream:
                rows = 0
                while rows < JOBS:
                    rows += len(read_event(stream)["rows"])
            print(f"start until {JOBS} rows are read: {time.perf_counter() - began:.2f} s")
            for name, path in (("list", "/"), (f"job of {RANKS} ranks", f"/run/{many.path.name}")):
                seconds, size = client.measure(path)
                print(f"{name}: {1000 * seconds:.0f} ms, {size / 1000:.0f} kB")
            print(f"change until the list has it: {measure_delay(client, many):.2f} s")
            if not explain_missing("chromium"):
                shown, short = asyncio.run(measure_paint(address, Path(scratch)))
                print(f"first paint of the list: {shown:.0f} ms; of a page of one sentence: {short:.0f} ms")
            print(f"idle with an open list: {100 * measure_idle(client, server.pid):.2f} % of a CPU")
            server.terminate()


if __name__ == "__main__":
    main()
