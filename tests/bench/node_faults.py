"""What a faulty node costs a job on real kubelets: seconds until it is named, until the next step, and what repeats.

Each run starts a job, lets a node fail, waits until the job trains on, lets the node return, and looks for leftovers.
Prints a line of JSON for each run, and a table. Asserts nothing. `tests/e2e/conftest.py` lists the variables that
describe the cluster; the operator runs there, on a node that the pods of training jobs do not use. In addition:

- ``DDP_BENCH_NODE``: a command to which ``FAULT NODE`` are added: ``off``, ``reboot``, ``freeze``, ``cut``, ``cut-in``,
  ``cut-out`` (packets to the node, from the node), ``heal``; and ``count NODE UID``, which prints the number of a pod's
  processes that are left on its node.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tests.e2e.conftest import UserNamespace, new_namespace
from tests.e2e.test_recovery import Training

FAULTS: Final = ("off", "reboot", "freeze", "cut", "cut-in", "cut-out")
RETURNS: Final = ("suspected", "replaced", "trained")
"""When the node returns: before its pod is declared lost, once it has a successor, or once training has continued."""
PATIENCE: Final = 400.0
RENEWAL: Final = 10.0
"""Of a node's Lease: the fault comes at any time of it."""
FOLDER: Final = "/e2e-checkpoints"
SCRIPT: Final = """
import os, socket, time
from datetime import timedelta
import torch
import torch.distributed as dist
from ddp_sdk.memory import MemoryCheckpoint

torch.set_num_threads(1)
own = socket.gethostbyname(socket.gethostname())
dist.init_process_group("gloo", timeout=timedelta(seconds=300))
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
memory = MemoryCheckpoint({"model": model, "optimizer": optimizer})
step = memory.restore(at_least=0) or 0
journal = os.open(os.environ["DDP_CHECKPOINT_DIR"] + f"/steps-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
while True:
    torch.manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    time.sleep(0.2)
    step += 1
    memory.save(step)
    os.write(journal, f"{step} {own} {time.time():.2f}\\n".encode())
    if rank == 0:
        print(f"step {step}", flush=True)
"""


class Step(NamedTuple):
    """A step in the journal of a rank, and the address of the pod that has made it."""

    number: int
    address: str
    time: float


@dataclass
class Run:
    """What one fault has cost, in seconds since then; None: it did not happen."""

    fault: str
    victim: str
    named: float | None = None
    declared: float | None = None
    replaced: float | None = None
    next_step: float | None = None
    later_pauses: int = 0
    """Of more than two seconds, when the node has returned."""
    repeated: int = 0
    written_twice: int = 0
    left_behind: str = ""
    reasons: list[tuple[float, str]] = field(default_factory=list)
    wrong_steps: list[tuple[float, int]] = field(default_factory=list)
    """Of the status, lower than before."""
    messages: list[tuple[float, str]] = field(default_factory=list)
    why: list[tuple[float, str]] = field(default_factory=list)
    highest_step: int = 0

    def note_step(self, seconds: float, step: int | None) -> None:
        """Note the step in the status."""
        if step is not None and step < self.highest_step:
            self.wrong_steps.append((seconds, step))
        self.highest_step = max(self.highest_step, step or 0)


class Bench:
    """A job that trains on while its nodes fail."""

    def __init__(self, cluster: UserNamespace, *, spares: int, nodes: int) -> None:
        self.cluster = cluster
        self.settle_seconds = 8.0
        self.spares = spares
        self.nodes = nodes
        self.background = ThreadPoolExecutor(1)
        self.explanations: list[tuple[float, Future[str]]] = []
        self.job = Training(
            cluster,
            "faulty",
            script=SCRIPT,
            folder="faulty",
            nodes=nodes,
            **({"spares": spares} if spares else {}),
            checkpoint={"path": FOLDER, "graceSeconds": 10, "memoryInterval": 1},
            metrics={},
        )

    def explain(self, struck: float) -> None:
        """Note what `ddp why` prints now, without waiting for it."""
        text = self.background.submit(self.cluster.why, self.job.name)
        self.explanations.append((round(time.time() - struck, 1), text))

    def read_steps(self, rank: int) -> list[Step]:
        """Return the last steps of a rank."""
        path = f"{FOLDER}/steps-{rank}"
        done = self.cluster.kubectl("exec", "reader", "--", "tail", "-n", "2000", path)
        steps = []
        for line in done.stdout.splitlines():
            number, address, at = line.split()
            steps.append(Step(int(number), address, float(at)))
        return steps

    def wait_for_steps(self, since: float, count: int) -> None:
        """Wait until all ranks have made some steps after a time, and all pods are ready."""
        _wait(lambda: all(self._count_steps(rank, since) >= count for rank in range(self.nodes)), "steps", 1.0)
        _wait(self._is_whole, "all pods are ready")

    def _count_steps(self, rank: int, since: float) -> int:
        return sum(step.time > since for step in self.read_steps(rank))

    def _is_whole(self) -> bool:
        status = self.job.status
        counts = status.get("nodes") or {}
        return (counts.get("ready"), counts.get("spares") or 0) == (self.nodes, self.spares)

    def find_pod(self, rank: int) -> Any:
        """Return the pod that has made the last step of a rank."""
        address = self.read_steps(rank)[-1].address
        return next(pod for pod in self.cluster.pods(self.job.name) if pod.status.pod_ip == address)


def measure(bench: Bench, fault: str, rank: int, when: str) -> Run:
    """Let the node of a rank's pod fail and return; return what that costs."""
    time.sleep(random.uniform(0, RENEWAL))
    pod = bench.find_pod(rank)
    node = pod.spec.node_name
    known = {item.metadata.uid for item in bench.cluster.pods(bench.job.name)}
    run = Run(fault, f"rank {rank}, pod {pod.metadata.name} on {node}; the node returns when {when}")
    struck = time.time()
    control_node(fault, node)
    healed = 0.0 if fault != "reboot" else struck
    read_at = struck
    while time.time() - struck < PATIENCE:
        observe(bench, run, struck, node, known)
        if time.time() - read_at > 1 and time.time() - struck > 3:
            read_at = time.time()
            run.next_step = find_next_step(bench, struck) or run.next_step
        is_over = run.declared is not None or time.time() - struck > 45 or healed
        if run.next_step is not None and (when != "trained" or is_over):
            break
        if not healed and is_due(run, when):
            control_node("heal", node)
            healed = time.time()
        time.sleep(0.25)
    bench.explain(struck)
    if not healed:
        time.sleep(3)
        control_node("heal", node)
    settle(bench, run, pod, struck, time.time())
    compare_journals(bench, run, struck)
    bench.explain(struck)
    run.why = [(seconds, text.result()) for seconds, text in bench.explanations]
    bench.explanations.clear()
    return run


def is_due(run: Run, when: str) -> bool:
    """Return whether the node returns now."""
    if when == "suspected":
        return run.named is not None
    return when == "replaced" and run.replaced is not None


def observe(bench: Bench, run: Run, struck: float, node: str, known: set[str]) -> None:
    """Note what the status reports, and what happens to the pods."""
    status = bench.job.status
    seconds = round(time.time() - struck, 1)
    reason = str(status.get("reason") or "")
    if not run.reasons or run.reasons[-1][1] != reason:
        run.reasons.append((seconds, reason))
    run.note_step(seconds, (status.get("progress") or {}).get("step"))
    for condition in status.get("conditions", ()):
        message = f"{condition['type']} {condition['reason']}: {condition.get('message', '')}"
        if condition["reason"] in ("NodeSilent", "NodeNotReady", "PeerUnreachable"):
            shape = re.sub(r"\d+", "N", message)
            if shape not in [re.sub(r"\d+", "N", text) for _, text in run.messages]:
                run.messages.append((seconds, message))
    if run.named is None and reason in ("NodeSilent", "NodeNotReady", "PeerUnreachable"):
        run.named = seconds
        bench.explain(struck)
    if run.declared is None and node in (status.get("failedNodes") or ()):
        run.declared = seconds
    if run.replaced is None and any(pod.metadata.uid not in known for pod in bench.cluster.pods(bench.job.name)):
        run.replaced = seconds


def find_next_step(bench: Bench, struck: float) -> float | None:
    """Return the seconds to the first step that all ranks have made after the fault and its pause."""
    latest = []
    for rank in range(bench.nodes):
        times = [struck, *(step.time for step in bench.read_steps(rank) if step.time > struck)]
        gaps = [later for earlier, later in itertools.pairwise(times) if later - earlier > 2]
        if not gaps:
            return None
        latest.append(gaps[-1])
    return round(max(latest) - struck, 1)


def settle(bench: Bench, run: Run, old: Any, struck: float, since: float) -> None:
    """Wait until the node is back and the job is whole; note which pods and processes are left."""
    node = old.spec.node_name
    known = {pod.metadata.uid for pod in bench.cluster.pods(bench.job.name)}
    shown = time.time()
    while time.time() - shown < bench.settle_seconds:
        observe(bench, run, struck, node, known)
        time.sleep(0.5)
    _wait(lambda: is_ready(bench.cluster, node), f"{node} is Ready")
    bench.wait_for_steps(since, 20)
    # A pod that was not replaced stays.
    is_current = any(pod.metadata.uid == old.metadata.uid for pod in bench.cluster.pods(bench.job.name))
    left = count_processes(node, old.metadata.uid)
    ended = time.time()
    while left and not is_current and time.time() - ended < 60:
        time.sleep(1)
        left = count_processes(node, old.metadata.uid)
    pods = bench.cluster.pods(bench.job.name)
    notes = [f"{time.time() - since:.0f} s after the return"]
    if is_current:
        notes.append("the pod is still in the job")
    elif left:
        notes.append(f"{left} processes of the old pod")
    if len(pods) != bench.nodes + bench.spares:
        notes.append(f"{len(pods)} pods: {[(pod.metadata.name, pod.status.phase) for pod in pods]}")
    run.left_behind = ", ".join(notes[1:])


def compare_journals(bench: Bench, run: Run, struck: float) -> None:
    """Count the steps that were made again after the fault, and those that two pods have written."""
    for rank in range(bench.nodes):
        steps = bench.read_steps(rank)
        if rank == 0 and run.next_step is not None:
            later = [step.time for step in steps if step.time >= struck + run.next_step]
            run.later_pauses = sum(end - begin > 2 for begin, end in itertools.pairwise(later))
        before = {step.number for step in steps if step.time <= struck}
        writers: dict[int, set[str]] = {}
        seen: set[int] = set()
        for step in steps:
            if step.time > struck:
                run.repeated += step.number in before or step.number in seen
                seen.add(step.number)
            writers.setdefault(step.number, set()).add(step.address)
        run.written_twice += sum(len(addresses) > 1 for number, addresses in writers.items() if number in seen)


def control_node(verb: str, *words: str) -> str:
    """Run the command for nodes; return its output."""
    line = [*shlex.split(os.environ["DDP_BENCH_NODE"]), verb, *words]
    # A daemon that it starts keeps the error output open.
    done = subprocess.run(line, check=True, timeout=300, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    return done.stdout


def count_processes(node: str, uid: str) -> int:
    """Return the number of a pod's processes on its node."""
    return int(control_node("count", node, uid) or 0)


def is_ready(cluster: UserNamespace, node: str) -> bool:
    """Return whether a node is Ready and has no taints."""
    found = cluster.core.read_node(node)
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in found.status.conditions)
    return ready and not found.spec.taints


def _wait(probe: Callable[[], Any], what: str, pause: float = 0.5) -> None:
    deadline = time.monotonic() + PATIENCE
    while not probe():
        if time.monotonic() > deadline:
            raise SystemExit(f"never happened: {what}")
        time.sleep(pause)


@contextmanager
def open_bench(*, spares: int, nodes: int, reader_node: str) -> Iterator[Bench]:
    """Start a job, and a pod that reads the journals."""
    with new_namespace() as cluster:
        bench = Bench(cluster, spares=spares, nodes=nodes)
        pod = bench.job.manifest["spec"]["template"]["spec"]
        container = {name: pod["containers"][0][name] for name in ("image", "volumeMounts")}
        container |= {"name": "reader", "imagePullPolicy": "IfNotPresent", "command": ["sleep", "100000"]}
        spec = {
            "nodeName": reader_node,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": pod["volumes"],
        }
        cluster.core.create_namespaced_pod(cluster.namespace, {"metadata": {"name": "reader"}, "spec": spec})
        yield bench


def show(runs: Sequence[Run]) -> None:
    """Print the table of a series."""
    print("| | named | declared | replaced | next step | later pauses | repeated | written twice | left behind |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number, run in enumerate(runs, 1):
        times = [run.named, run.declared, run.replaced, run.next_step]
        cells = ["-" if seconds is None else f"{seconds:.1f}" for seconds in times]
        counts = [str(count) for count in (run.later_pauses, run.repeated, run.written_twice)]
        print(f"| {' | '.join([str(number), *cells, *counts, run.left_behind or 'none'])} |")
    known = sorted(run.next_step for run in runs if run.next_step is not None)
    if known:
        print(f"next step: median {statistics.median(known):.1f} s, {known[0]:.1f} to {known[-1]:.1f} s")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a series and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rank", type=int, default=1, help="whose node fails")
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--returns", choices=RETURNS, default="trained")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds of observation after the return")
    parser.add_argument("--reader", required=True, help="the node on which the journals are read")
    arguments = parser.parse_args(argv)
    runs = []
    for _ in range(arguments.repeats):
        # A job of its own: it avoids the nodes that it has lost before.
        with open_bench(spares=arguments.spares, nodes=arguments.nodes, reader_node=arguments.reader) as bench:
            bench.settle_seconds = arguments.settle
            bench.wait_for_steps(time.time(), 20)
            run = measure(bench, arguments.fault, arguments.rank, arguments.returns)
        print(json.dumps(vars(run)), flush=True)
        runs.append(run)
    show(runs)


if __name__ == "__main__":
    main()
