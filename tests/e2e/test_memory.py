"""Checkpoints in memory on real kubelets: each fault, with copies in memory and without.

The script saves a checkpoint to the shared disk every 50 steps. With copies after each step no completed step may be
repeated, and the final state is bit by bit that of an undisturbed run. The seconds are printed; no test asserts them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from .conftest import UserNamespace, new_namespace
from .node_shell import open_node_shell
from .test_recovery import Training, lose_node

__all__ = ["lose_node"]  # a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 240
_STEPS_IN_PROGRESS = 2  # that a log may not have shown at the fault
HOLD = 160
"""After this step a job waits for the fault, which a loaded machine injects late."""
SCRIPT = """
import glob, hashlib, os, time
from datetime import timedelta
import torch
import torch.distributed as dist
from ddp_sdk.memory import MemoryCheckpoint

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
rank = dist.get_rank()
torch.manual_seed(1)
network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
model = torch.nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
memory = MemoryCheckpoint({"model": model, "optimizer": optimizer})
folder = os.environ["DDP_CHECKPOINT_DIR"]
disk = folder + "/state.pt"
on_disk = torch.load(disk) if os.path.exists(disk) else {"step": 0}
step = memory.restore(at_least=on_disk["step"])
source = "memory"
if step is None:
    source = "disk"
    step = on_disk["step"]
    if step:
        model.load_state_dict(on_disk["model"])
        optimizer.load_state_dict(on_disk["optimizer"])
dist.barrier()
completed = max([int(open(path).read()) for path in glob.glob(folder + "/completed-*")], default=0)
if rank == 0:
    print(f"begins after step {step} of {completed} completed, from {source}", flush=True)
dist.barrier()
journal = os.open(f"{folder}/completed-{rank}", os.O_CREAT | os.O_WRONLY, 0o644)
while step < STEPS:
    torch.manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.1)
    step += 1
    memory.save(step)
    os.pwrite(journal, b"%09d" % step, 0)
    if rank == 0:
        print(f"step {step} time {time.time():.2f}", flush=True)
    while step == HOLD and not completed:
        time.sleep(0.05)
    if rank == 0:
        if step % 50 == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, disk + ".tmp")
            os.rename(disk + ".tmp", disk)
memory.close()
digest = hashlib.sha256()
for leaf in torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()]):
    if isinstance(leaf, torch.Tensor):
        digest.update(leaf.numpy().tobytes())
if rank == 0:
    print(f"final {step} {digest.hexdigest()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
BEGINS = re.compile(r"begins after step (\d+) of (\d+) completed, from (\w+)")
STEP = re.compile(r"^step (\d+) time ([\d.]+)$", re.MULTILINE)
FINAL = re.compile(r"^final (\d+ \w+)$", re.MULTILINE)

Fault = Callable[[Training], float]
"""Injects a fault and returns its time in Unix seconds."""


class FaultCost(NamedTuple):
    """What a fault costs: repeated steps, and seconds to the first step that had not been completed before."""

    redone: int
    seconds: float
    source: str
    final: str


def start(cluster: UserNamespace, name: str, *, memory: bool, nodes: int = 2, hold: int = HOLD) -> Training:
    """Start a job that copies its state in memory after each step, or not at all.

    ``hold``: the step after which it waits for a restart; 0: it does not.
    """
    checkpoint = {
        "path": "/e2e-checkpoints",
        "graceSeconds": 10,
        "memoryInterval": 1 if memory else 0,
    }
    return Training(
        cluster,
        name,
        script=SCRIPT.replace("STEPS", str(STEPS)).replace("HOLD", str(hold)),
        folder=name,
        nodes=nodes,
        checkpoint=checkpoint,
        metrics={},
        recovery={"forceDeleteAfterSeconds": 10},
    )


def read_steps(job: Training) -> list[tuple[int, float]]:
    """Return the steps of pod 0 as it is now: their numbers and times in Unix seconds."""
    return [(int(step), float(at)) for step, at in STEP.findall(job.log())]


def measure(job: Training, fault: Fault, *, at_least: int = 80) -> FaultCost:
    """Inject a fault after some steps, and return what it costs."""
    job.cluster.until(lambda: (steps := read_steps(job)) and steps[-1][0] >= at_least, f"{at_least} steps")
    struck = fault(job)
    found: list[tuple[re.Match[str], float]] = []

    def continues() -> bool:
        log = job.log()
        starts = list(BEGINS.finditer(log))
        if not starts or int(starts[-1][2]) < at_least:
            return False
        steps = STEP.findall(log[starts[-1].end() :])
        new = [float(at) for step, at in steps if int(step) > int(starts[-1][2]) and float(at) > struck]
        found[:] = [(starts[-1], new[0])] if new else []
        return bool(found)

    job.cluster.until(continues, f"{job.name} makes a new step")
    begins, first = found[0]
    job.cluster.phase(job.name, "Succeeded", "Failed")
    status = job.status
    assert status["phase"] == "Succeeded", status
    final = FINAL.findall(job.log())
    assert final, job.log()[-2000:]
    recovery = FaultCost(int(begins[2]) - int(begins[1]), first - struck, begins[3], final[-1])
    reported = status["lastRestart"].get("stepsLost")
    print(
        f"{job.name}: {recovery.redone} steps redone (status: {reported}), next new step after "
        f"{recovery.seconds:.1f} s, from {recovery.source}"
    )
    assert reported is not None
    assert abs(reported - recovery.redone) <= _STEPS_IN_PROGRESS
    return recovery


@pytest.fixture(scope="module")
def undisturbed(operator: object) -> Iterator[str]:
    """The final state of an undisturbed run of two pods."""
    with new_namespace() as cluster:
        job = start(cluster, "undisturbed", memory=True, hold=0)
        cluster.phase(job.name, "Succeeded", "Failed")
        [final] = FINAL.findall(job.log())
        yield final


def kill(role: str) -> Fault:
    """Return the SIGKILL of a process of pod 1."""

    def fault(job: Training) -> float:
        pod = job.pod(1)
        with open_node_shell(job.cluster, pod.spec.node_name, pod.spec.containers[0].image) as shell:
            return shell.kill(pod, role)

    return fault


def delete(job: Training) -> float:
    """Delete pod 1."""
    name = job.pod(1).metadata.name
    now = time.time()
    job.cluster.core.delete_namespaced_pod(name, job.cluster.namespace)
    return now


@pytest.mark.parametrize(
    ("name", "fault"),
    [("rank", kill("rank")), ("agent", kill("agent")), ("launcher", kill("launcher")), ("pod", delete)],
    ids=["rank killed", "agent killed", "launcher killed", "pod deleted"],
)
def test_fault_costs_no_completed_step(cluster: UserNamespace, undisturbed: str, name: str, fault: Fault) -> None:
    with_memory, without = compare(cluster, name, fault)
    assert (with_memory.redone, with_memory.source, with_memory.final) == (0, "memory", undisturbed)
    assert (without.source, without.final) == ("disk", undisturbed)


def test_lost_node_costs_no_completed_step(
    cluster: UserNamespace, undisturbed: str, lose_node: Callable[[str], None]
) -> None:
    def fault(job: Training) -> float:
        node = job.pod(1).spec.node_name
        assert node != job.pod(0).spec.node_name, "the cluster has only one node with room"
        now = time.time()
        lose_node(node)
        return now

    # Without copies in memory this costs a second loss of the node, and its 40 s.
    recovery = measure(start(cluster, "node", memory=True), fault)
    assert (recovery.redone, recovery.source, recovery.final) == (0, "memory", undisturbed)


def test_one_of_eight_pods_costs_no_completed_step(cluster: UserNamespace) -> None:
    # With more than two ranks DDP adds up gradients in another order after any restart: the last bits may differ.
    with_memory, without = compare(cluster, "eight", delete, nodes=8)
    assert (with_memory.redone, with_memory.source) == (0, "memory")
    assert without.source == "disk"


def compare(cluster: UserNamespace, name: str, fault: Fault, *, nodes: int = 2) -> tuple[FaultCost, FaultCost]:
    """Inject the fault with copies in memory and without; print and return both costs."""
    with_memory = measure(start(cluster, name, memory=True, nodes=nodes), fault)
    without = measure(start(cluster, f"{name}-disk", memory=False, nodes=nodes), fault)
    print(f"{name}: with copies in memory {with_memory.seconds / without.seconds:.2f} of the time without")
    return with_memory, without
