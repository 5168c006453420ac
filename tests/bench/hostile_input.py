"""The cost of hostile pods, Jobs and specs for the operator: the longest pause of its event loop, and its memory.

Every check of a spec runs at the limits of size (``tests/support/limit_specs.py``); the slowest are printed.

Each row is a process. The idle operator runs against the stand-in API server. Then one tenant attacks a running
operator, while another one submits jobs (``hostile_tenant``). Asserts nothing:

    python -m tests.bench.hostile_input
    python -m tests.bench.hostile_input --attack "longest scripts" --jobs 100 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kopf
import msgspec

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.parse import parse_resource
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.views import PodView
from ddp_operator.features import SCHEMA
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.incoming import limit_event, limit_response
from ddp_operator.kube.resync import CHILD_SELECTOR
from ddp_operator.kube.watch import _list
from ddp_operator.manager.operator import Operator
from ddp_operator.manager.settings import Settings
from ddp_operator.manifests.children import build_children, load_launcher
from ddp_operator.manifests.template import check_log_patterns
from ddp_operator.reading.objects import view_pod
from ddp_operator.reconcile.fair_turns import FairTurns
from ddp_operator.reconcile.limits import PageBudget
from ddp_operator.reconcile.observer import Observer
from ddp_pod.contract.run_report import REPORT_LIMIT
from tests.bench import hostile_tenant
from tests.bench.figures import table
from tests.support.builders import child_job, child_pod, job, resource, template, trainer
from tests.support.control_plane import free_ports
from tests.support.hostile_jobs import NESTED, NESTED_LISTS
from tests.support.limit_specs import list_specs
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors, StandIn

BEAT = 0.005
SETTLE = 3.0
PODS = 40
JOBS = 400
RANK = '{"rank": 1, "step": 1, "a": [[], {}]},'
HOSTILE_REPORT = f'{{"version": 2, "ranks": [{RANK * (REPORT_LIMIT // len(RANK) - 2)}{{}}]}}'
PATTERNS = ["(?i)(?P<step>[\0-\uffff])" + "[\u0100-\uffff]" * 95 + str(number) for number in range(8)]


class LatencyProbe:
    """The longest delay of a task that is due every 5 ms."""

    def __init__(self) -> None:
        self.pause = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(BEAT)
            self.pause = max(self.pause, time.perf_counter() - began - BEAT)


async def measure(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Return the longest pause in seconds while an action runs, and the peak memory of the process in MiB."""
    measured = LatencyProbe()
    beating = asyncio.create_task(measured.run())
    await asyncio.sleep(0.2)
    await work()
    await asyncio.sleep(0.2)
    beating.cancel()
    return measured.pause, read_peak()


def read_peak(process: int | str = "self", name: str = "VmHWM") -> float:
    """Return the peak resident memory of a process in MiB; ``getrusage`` would include the parent's."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    [peak] = [line for line in lines if line.startswith(f"{name}:")]
    return int(peak.split()[1]) / 1024


class Hostile(BaseHTTPRequestHandler):
    """Serves the report of any pod, and pages of Jobs of a megabyte."""

    def do_GET(self) -> None:
        """Respond."""
        url = urlsplit(self.path)
        body = HOSTILE_REPORT.encode() if url.path == "/report" else list_jobs(parse_qs(url.query))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the reader has closed the connection
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def list_jobs(query: dict[str, list[str]]) -> bytes:
    """Return a page of Jobs with our labels and controller, whose real author is a tenant."""
    first = int(query.get("continue", ["0"])[0])
    last = min(JOBS, first + int(query["limit"][0]))
    items = []
    for number in range(first, last):
        item = child_job(number + 1)
        item["metadata"] |= {"uid": str(number), "resourceVersion": "5", "annotations": {"a": "x" * 2**18}}
        item["spec"]["template"] = {"spec": {"containers": [{"name": "a", "args": ["x" * 3 * 2**18]}]}}
        items.append(item)
    more = {"continue": str(last)} if last < JOBS else {}
    return msgspec.json.encode({"items": items, "metadata": {"resourceVersion": "9"} | more})


@contextmanager
def serve() -> Iterator[int]:
    """Serve on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def build_client(port: int) -> ApiClient:
    """Return a client of the server."""

    async def log_in() -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=f"http://127.0.0.1:{port}")

    return ApiClient(log_in)


def build_pods() -> list[PodView]:
    """Return the pods of a job, all at one address."""
    pods = [child_pod(index) for index in range(PODS)]
    for pod in pods:
        pod["status"]["podIP"] = "127.0.0.1"
    return [view_pod(pod) for pod in pods]


async def read_pages(port: int) -> None:
    """Read the reports of all pods as the operator does when a job reports a restart in the same pods."""
    cluster = KubeCluster(build_client(port))
    observer = Observer(cluster, utc_now, FairTurns(), 10.0, Hooks())
    result = await observer._read_pages(job(metrics={"port": port}), build_pods(), PageBudget())
    await cluster.close()
    print(f"reports read within the budget: {len(result)} of {PODS}", file=sys.stderr)


async def list_foreign_jobs(port: int) -> None:
    """List Jobs into the cache as the operator does at its start."""
    store = ObjectCache()
    client = build_client(port)

    def keep(kind: str, event: str | None, obj: Any) -> None:
        store.apply(kind, obj)

    await _list(client, "Job", None, {"labelSelector": CHILD_SELECTOR}, "application/json", keep)
    await client.close()
    print(f"Jobs kept: {len(store)}", file=sys.stderr)


async def check_patterns(port: int) -> None:
    """Check a job's patterns as the operator does before it creates the Job."""
    assert not list(check_log_patterns(PATTERNS))


async def check_specs(port: int) -> None:
    """Parse specs at the limits and build their children, as the operator does for a new job. Print the slowest."""
    load_launcher()
    seconds = {}
    for name, spec in list_specs():
        began = time.perf_counter()
        with suppress(InvalidManifest):
            build_children(job(**spec), attempt=1, nodes=2)
        seconds[name] = time.perf_counter() - began
        await asyncio.sleep(0)
    print(f"specs at the limits: {len(seconds)}; the slowest:", file=sys.stderr)
    for name in sorted(seconds, key=lambda name: -seconds[name])[:5]:
        print(f"  {seconds[name]:.3f} s {name}", file=sys.stderr)


async def refuse_oversize_specs(port: int) -> None:
    """Refuse specs of the size that an API server stores."""
    for spec in (
        {"a": "(" * 1_400_000},
        {"a": [[] for _ in range(460_000)]},
        {"a": {str(n): {} for n in range(99_999)}},
    ):
        with suppress(InvalidManifest):
            parse_resource(resource(**spec), SCHEMA)
        await asyncio.sleep(0)


async def limit_nested_event(port: int) -> None:
    """Limit an event of 1.4 MB of nested lists."""
    event = {"type": "ADDED", "object": resource(a=NESTED)}
    await limit_event(msgspec.json.encode(event).replace(b'"%s"' % NESTED.encode(), NESTED_LISTS), brief=True)


async def limit_page(port: int) -> None:
    """Limit a page of ten such resources."""
    page = {"kind": "DDPTrainingJobList", "items": [resource(a=NESTED)] * 10, "metadata": {}}
    await limit_response(msgspec.json.encode(page).replace(b'"%s"' % NESTED.encode(), NESTED_LISTS), brief=True)


async def measure_idle() -> tuple[float, float]:
    """Measure an operator without a job, once it has started."""
    operator = Operator(Settings.from_env())
    await operator.start()
    await asyncio.sleep(SETTLE)
    figures = await measure(lambda: asyncio.sleep(SETTLE))
    await operator.stop()
    return figures


async def measure_row(name: str, port: int) -> tuple[float, float]:
    """Measure one row in this process."""
    return await measure_idle() if name == IDLE else await measure(lambda: ATTACKS[name](port))


IDLE = "idle operator"
SPECS = "every check at its limit"
ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    f"{PODS} hostile reports": read_pages,
    f"{JOBS} foreign Jobs": list_foreign_jobs,
    "8 hostile patterns": check_patterns,
    SPECS: check_specs,
    "3 oversize specs": refuse_oversize_specs,
    "a nested event": limit_nested_event,
    "a page of ten nested resources": limit_page,
}


ROWS = (IDLE, *ATTACKS)
ORDINARY = 200
HOSTILE: dict[str, Any] = {
    "specs of 240 KB": {"template": template(trainer(args=["x" * 240_000]))},
    "specs of 9,600 values": {
        "template": template(trainer(env=[{"name": f"V{number}", "value": "x"} for number in range(3200)]))
    },
    "specs of 1.4 MB": {"template": {"spec": {"containers": [trainer()], "a": [[]] * 460_000}}},
}


def measure_jobs(api: StandIn, folder: Path) -> Iterator[str]:
    """Measure the memory of one operator: with ordinary jobs, then with further suspended ones of each kind."""
    kubeconfig = api.write_kubeconfig(folder)
    (port,) = free_ports(1)
    with OperatorProcess(kubeconfig, folder / "operator.log", port=port) as operator:
        assert operator.process is not None
        process = operator.process.pid
        yield f"no job: {read_peak(process, 'VmRSS'):.0f} MiB"
        asyncio.run(create_jobs(kubeconfig, "ordinary", {"template": template()}, ORDINARY))
        yield f"{ORDINARY} ordinary jobs: {read_peak(process, 'VmRSS'):.0f} MiB"
        for number, (name, spec) in enumerate(HOSTILE.items()):
            count = ORDINARY // (1 + 9 * (number > 0))  # the stand-in needs seconds for each of the others
            asyncio.run(create_jobs(kubeconfig, f"hostile-{number}", {**spec, "suspend": True}, count))
            yield f"and {count} {name}: {read_peak(process, 'VmRSS'):.0f} MiB"
        yield f"maximum: {read_peak(process):.0f} MiB"


async def create_jobs(kubeconfig: Path, name: str, spec: dict[str, Any], count: int) -> None:
    """Create jobs, and give the operator time for them."""
    async with ClusterActors(kubeconfig) as actors:
        for number in range(count):
            await actors.create(resource(f"{name}-{number}", **spec))
    await asyncio.sleep(2 * SETTLE)


def run_row(name: str, port: int, env: dict[str, str]) -> tuple[float, float]:
    """Run a row in a separate process. Return its pause and its memory."""
    command = [sys.executable, "-m", "tests.bench.hostile_input", "--row", name, "--port", str(port)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    pause, memory = json.loads(done.stdout)
    return pause, memory


def main(argv: Sequence[str] | None = None) -> None:
    """Measure alternately and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--attack", choices=hostile_tenant.ATTACKS, action="append", help="run only these attacks")
    parser.add_argument("--jobs", type=int, default=hostile_tenant.JOBS, help="of the attacker")
    parser.add_argument("--seconds", type=float, default=hostile_tenant.SECONDS, help="of each attack")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.row:
        print(json.dumps(asyncio.run(measure_row(arguments.row, arguments.port))))
        return
    if not arguments.attack:
        measure_rows(arguments.repeats)
    attacks = arguments.attack or list(hostile_tenant.ATTACKS)
    print(f"\nattacks of {arguments.jobs} jobs: longest times, CPU time and peak memory of the operator")
    for line in hostile_tenant.measure_attacks(attacks, arguments.jobs, arguments.seconds):
        print(line, flush=True)


def measure_rows(repeats: int) -> None:
    """Measure the rows alternately, and the memory of one operator, and print."""
    pauses: dict[str, list[float]] = {name: [] for name in ROWS}
    memory: dict[str, list[float]] = {name: [] for name in ROWS}
    with StandIn() as api, serve() as port, tempfile.TemporaryDirectory() as folder:
        kubeconfig = str(api.write_kubeconfig(Path(folder)))
        env = os.environ | {"KUBECONFIG": kubeconfig, "DDP_OPERATOR_HEALTH_PORT": "0"}
        for _ in range(repeats):
            for name in ROWS:
                pause, mebibytes = run_row(name, port, env)
                pauses[name].append(pause)
                memory[name].append(mebibytes)
    print(table("longest pause of the event loop", pauses, digits=3))
    print(table("most resident memory", memory, "MiB", 1))
    with StandIn() as api, tempfile.TemporaryDirectory() as folder:
        print("\nmemory of the operator", *measure_jobs(api, Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
