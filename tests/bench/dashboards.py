"""The dashboards' queries and the rules, at a real Prometheus that holds an hour of a large job's series.

Needs `prometheus` on the PATH and about 5 GB of memory for 8,000 ranks. Prints the time of each query, slowest
first, and of each group of rules; asserts nothing:

    python -m tests.bench.dashboards --ranks 8000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.large_jobs import RANKS, rank_series
from tests.support import ROOT
from tests.support.control_plane import free_ports

MONITORING: Final = ROOT / "deploy" / "monitoring"
STEP: Final = 15
"""Seconds between two scrapes, as in the chart, and between two points of a graph."""
HOUR: Final = 3600
BATCH: Final = 2000
"""Series in one remote write."""
GPU: Final = {
    "DCGM_FI_DEV_GPU_UTIL": 90, "DCGM_FI_DEV_POWER_USAGE": 600, "DCGM_FI_DEV_FB_USED": 60_000,
    "DCGM_FI_DEV_FB_FREE": 20_000, "DCGM_FI_DEV_XID_ERRORS": 0,
}  # fmt: skip
"""The series that dcgm-exporter has for a GPU."""
VARIABLES: Final = {
    "$cluster": "", "$namespace": "team", "$ddp_job": "large", "$__rate_interval": f"{4 * STEP}s", "$__range": "1h",
}  # fmt: skip


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it (https://protobuf.dev/programming-guides/encoding/)."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, body: bytes) -> bytes:
    """Return a field with a length."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def snappy(body: bytes) -> bytes:
    """Return a block in Snappy's format without compression: literals of at most 64 KiB."""
    parts = [body[at : at + 65_536] for at in range(0, len(body), 65_536)]
    return varint(len(body)) + b"".join(b"\xf4" + struct.pack("<H", len(part) - 1) + part for part in parts)


def time_series(labels: dict[str, str], samples: bytes) -> bytes:
    """Return a TimeSeries of a WriteRequest (Prometheus' remote write 1.0)."""
    pairs = sorted(labels.items())
    return field(1, b"".join(field(1, field(1, k.encode()) + field(2, v.encode())) for k, v in pairs) + samples)


def encode(times: Sequence[float], values: Sequence[float]) -> bytes:
    """Return the samples of a TimeSeries."""
    pairs = zip(times, values, strict=True)
    return b"".join(field(2, b"\x09" + struct.pack("<d", v) + b"\x10" + varint(int(t * 1000))) for t, v in pairs)


class LoopbackPrometheus:
    """A Prometheus on loopback, with the project's rules, that accepts remote writes."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "prometheus.yaml"
        rules = [str(MONITORING / "alerts" / "jobs.yaml")]
        storage = {"tsdb": {"out_of_order_time_window": "2h"}}
        settings = {"global": {"evaluation_interval": "30s"}, "rule_files": rules, "storage": storage}
        config.write_text(json.dumps(settings))
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver", "--log.level=error",
             "--storage.tsdb.min-block-duration=6h", "--storage.tsdb.max-block-duration=6h"],  # samples of hours
        )  # fmt: skip

    def get(self, path: str, **params: Any) -> Any:
        """Return the data of a response. Raises: HTTPError, with the query's error as its body."""
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(params)}", timeout=300) as answer:
            return json.load(answer)["data"]

    @property
    def groups(self) -> Any:
        """The groups of rules, with their evaluations."""
        return self.get("/api/v1/rules")["groups"]

    def write(self, series: Sequence[bytes]) -> None:
        """Send series by a remote write."""
        headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
        headers["X-Prometheus-Remote-Write-Version"] = "0.1.0"
        request = urllib.request.Request(f"{self.url}/api/v1/write", snappy(b"".join(series)), headers)
        urllib.request.urlopen(request, timeout=300).close()

    def await_ready(self) -> None:
        """Wait until Prometheus responds."""
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
                return
            if self.process.poll() is not None:
                sys.exit(f"prometheus ended with {self.process.returncode}")
            time.sleep(0.1)

    @property
    def memory(self) -> float:
        """The peak memory of this process, GB."""
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())[1]) / 1e6  # type: ignore[index]


def write_history(prometheus: LoopbackPrometheus, ranks: int, times: Sequence[float]) -> int:
    """Write the series of the ranks of one job at these times. Return the number of series."""
    began = times[0] - 600
    # Seven ranks have different samples, the others share them: so the samples are encoded once.
    packed = [
        {name: encode(times, [row[name] for row in rows]) for name in rows[0]}
        for kind in range(7)
        for rows in [[rank_series(when - began, kind) for when in times]]
    ]
    batch: list[bytes] = []
    count = 0
    for rank in range(ranks):
        pod = f"large-1-{rank // RANKS}"
        base = {"namespace": "team", "ddp_job": "large", "ddp_attempt": "1", "pod": pod, "instance": pod}
        for name, samples in packed[rank % 7].items():
            series, _, more = name.partition(",")
            label, _, value = more.partition("=")
            labels = base | {"__name__": series, "rank": str(rank)} | ({label: value.strip('"')} if more else {})
            batch.append(time_series(labels, samples))
            count += 1
        for name, value in GPU.items():
            labels = {"__name__": name, "namespace": "team", "pod": pod, "gpu": str(rank % RANKS)}
            batch.append(time_series(labels, encode(times, [value] * len(times))))
            count += 1
        if rank % RANKS == 0:
            for phase in ("Starting", "Rendezvous", "Running"):
                labels = base | {"__name__": "ddp_launcher_phase", "phase": phase}
                batch.append(time_series(labels, encode(times, [float(phase == "Running")] * len(times))))
            labels = base | {"__name__": "ddp_launcher_in_place_restarts_total"}
            batch.append(time_series(labels, encode(times, [0.0] * len(times))))
            count += 4
        if len(batch) >= BATCH:
            prometheus.write(batch)
            batch.clear()
        if rank % 1000 == 999:
            print(f"  {rank + 1} of {ranks} ranks written, {prometheus.memory:.1f} GB", flush=True)
    prometheus.write(batch)
    return count


def write_recorded(prometheus: LoopbackPrometheus, ranks: int, times: Sequence[float]) -> int:
    """Write a history of the recorded series: their present values, at all of these times."""
    results: list[Any] = []
    while sum(item["metric"]["__name__"] == "ddp:rank_work:seconds" for item in results) < ranks:
        time.sleep(STEP)  # rules ran while ranks were still written
        results = prometheus.get("/api/v1/query", query='{__name__=~"ddp:.*"}')["result"]
    batch = [time_series(item["metric"], encode(times, [float(item["value"][1])] * len(times))) for item in results]
    for at in range(0, len(batch), BATCH):
        prometheus.write(batch[at : at + BATCH])
    return len(batch)


def queries() -> Iterator[tuple[str, str, bool]]:
    """Yield the panel and query of each target of the dashboards of jobs, and whether it reads one moment."""
    for board in ("job", "fleet"):
        for panel in json.loads((MONITORING / "dashboards" / f"{board}.json").read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"]
                for name, value in VARIABLES.items():
                    expr = expr.replace(name, value)
                yield f"{board}: {panel['title']}", expr, bool(target.get("instant"))


def measure(ranks: int, minutes: int, rounds: int) -> None:
    """Fill a Prometheus, and time rules and queries."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        prometheus = LoopbackPrometheus(Path(name))
        stack.callback(prometheus.process.wait)
        stack.callback(prometheus.process.terminate)
        prometheus.await_ready()
        now = time.time()
        times = [now - minutes * 60 + offset for offset in range(0, minutes * 60 + 1, STEP)]
        since = time.perf_counter()
        count = write_history(prometheus, ranks, times)
        took = time.perf_counter() - since
        print(
            f"{count} series of {len(times)} samples written in {took:.0f} s; Prometheus has {prometheus.memory:.1f} GB"
        )
        print(f"{write_recorded(prometheus, ranks, times)} series that the rules record", flush=True)
        end = times[-1]
        rows = []
        for panel, expr, instant in queries():
            window = {"time": end} if instant else {"start": end - minutes * 60, "end": end, "step": STEP}
            path = "/api/v1/query" if instant else "/api/v1/query_range"
            took_each = []
            results = []
            for _ in range(rounds):
                since = time.perf_counter()
                results = prometheus.get(path, query=expr, **window)["result"]
                took_each.append(time.perf_counter() - since)
            rows.append((statistics.median(took_each), panel, len(results), expr))
        for group in prometheus.groups:
            print(f"rules {group['name']}: {group['evaluationTime']:.2f} s every {group['interval']:.0f} s")
            for rule in sorted(group["rules"], key=lambda rule: -rule["evaluationTime"])[:3]:
                print(f"    {rule['evaluationTime']:6.2f} s  {rule['name']}")
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, {prometheus.memory:.1f} GB at most")
        print(f"{len(rows)} queries over {minutes} minutes: median {statistics.median(row[0] for row in rows):.2f} s")
        for seconds, panel, series, expr in sorted(rows, reverse=True):
            print(f"{seconds:7.2f} s  {series:5d} series  {panel}  {expr[:60]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=8000)
    parser.add_argument("--minutes", type=int, default=60, help="of history")
    parser.add_argument("--rounds", type=int, default=3, help="of each query; the median is printed")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("not run: prometheus not found (`make tools` installs it)")
    measure(options.ranks, options.minutes, options.rounds)


if __name__ == "__main__":
    main()
