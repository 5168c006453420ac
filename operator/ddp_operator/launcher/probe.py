"""The probe: what the ranks' network carries, measured by children of the agent that are gone before ranks start."""

import contextlib
import datetime
import json
import math
import os
import select
import signal
import time
from typing import Any, Callable, Iterator, Optional, Sequence

from .nccl_log import SOCKET, CommunicatorNetwork, read_network
from .pod import Pod
from .processes import kill, set_parent_death_signal

_SECONDS = 60.0
_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_REPEATS = 3
_MOST_ROUNDS = 8
_LOG_BYTES = 4 << 20


def measure_network(torch: Any, pod: Pod, ranks: Sequence[tuple[int, int, int]], pairs: bool) -> dict[str, Any]:
    """All-reduce over all ranks, in children of this process. ``ranks``: (local rank, rank, world size) of this pod's.

    Returns ``seconds`` for a single number, ``rate``, bytes a second for a large tensor, ``transport``, ``direct`` and
    ``reason`` as in ``nccl_log.Network``, and where asked for ``pairs``, those of ``measure_pairs``. Raises: OSError.
    """
    children: dict[int, int] = {}
    for one in ranks:
        result, result_end = os.pipe()
        pid = os.fork()
        if not pid:
            outcome: dict[str, Any] = {"problem": "the probe ended without a result"}
            log = os.path.join(pod.runtime, f"nccl-{one[0]}.log")
            try:
                set_parent_death_signal(os.getppid())
                os.close(result)
                outcome = _measure(torch, pod, one, pairs, log)
            except BaseException as error:
                reason = read_network(_read(log)).reason
                words = f"{type(error).__name__}: {str(error)[:500]}"
                outcome = {"problem": f"{words} (NCCL: {reason})" if reason else words}
            finally:
                with contextlib.suppress(OSError), open(result_end, "w") as pipe:
                    json.dump(outcome, pipe)
                os._exit(0)
        os.close(result_end)
        children[result] = pid
    deadline = time.monotonic() + _SECONDS + 10
    figures: list[dict[str, Any]] = []
    for result, pid in children.items():
        figures.append(read_outcome(result, deadline))
        os.close(result)
        kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return sum_up(figures)


def read_outcome(pipe: int, deadline: float) -> dict[str, Any]:
    """Return what a child says of its rank before it closes its end of the pipe, else what became of it.

    ``deadline``: in seconds of the monotonic clock.
    """
    text = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            try:
                outcome: dict[str, Any] = json.loads(text)
            except ValueError:  # nothing, or half of it
                return {"problem": "the probe was killed"}
            return outcome
        text += part
    return {"problem": "no result in time"}


def sum_up(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a pod's ranks found as one: the longest time, and the network of the rank that has the worst.

    Raises: OSError where one has failed.
    """
    problems = [one["problem"] for one in figures if "problem" in one]
    if problems:
        raise OSError(f"all-reduce of all ranks: {problems[0]}")
    telling = [one for one in figures if one["transport"]]  # a rank with no neighbour in another pod sees no network
    worst = min(telling or figures, key=lambda one: (one["transport"] != SOCKET, one["direct"]))
    slowest = {key: max(one[key] for one in figures) for key in ("seconds", "rate")}
    return {**figures[0], **slowest, **{key: worst[key] for key in ("transport", "direct", "reason")}}


def _measure(torch: Any, pod: Pod, place: tuple[int, int, int], pairs: bool, log: str) -> dict[str, Any]:
    """Measure as one rank."""
    local_rank, rank, world = place
    dist = torch.distributed
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    limit = datetime.timedelta(seconds=_SECONDS)
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,ENV,P2P", NCCL_DEBUG_FILE=log)
    if world == pod.nproc_per_node:
        store = dist.FileStore(os.path.join(pod.runtime, "preflight"), world)
    else:
        host = "localhost" if pod.node == 0 else pod.master
        store = dist.TCPStore(host, pod.port, None, False, timeout=limit)
    dist.init_process_group(
        backend, store=dist.PrefixStore("preflight", store), rank=rank, world_size=world, timeout=limit
    )

    def measure(act: Callable[[], Any]) -> float:
        start = time.monotonic()
        act()
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.monotonic() - start

    number = torch.ones(1, device=device)
    large = torch.ones(_BYTES[backend] // 4, device=device)
    measure(lambda: dist.all_reduce(large))  # connections are made at the first use
    seconds = min(measure(lambda: dist.all_reduce(number)) for _ in range(_REPEATS))
    fastest = min(measure(lambda: dist.all_reduce(large)) for _ in range(_REPEATS))
    if not is_sum(float(large[0]), world, _REPEATS + 1):
        raise OSError(f"a wrong sum: {float(large[0])}")
    if world == pod.nproc_per_node:
        network = CommunicatorNetwork()
    else:  # gloo has no other network
        network = (
            read_network(_read(log))
            if on_gpu
            else CommunicatorNetwork(SOCKET, reason="the ranks have no GPU: gloo uses TCP")
        )
    figures: dict[str, Any] = {
        "seconds": seconds,
        # Each rank sends and receives this share of the data in a ring, which makes figures of all sizes comparable.
        "rate": _BYTES[backend] * 2 * (world - 1) / max(1, world) / fastest,
        **vars(network),
    }
    if pairs and world > pod.nproc_per_node:
        figures["pairs"] = _measure_pairs(torch, pod, rank, world, large, measure)
    return figures


def _measure_pairs(
    torch: Any, pod: Pod, rank: int, world: int, tensor: Any, measure: Callable[[Callable[[], Any]], float]
) -> list[tuple[int, int, float]]:
    """Let pods exchange tensors two by two, all pairs of a round at the same time. Returns (pod, pod, bytes a second).

    Of each pair all ranks send to those of the same place, and receive: bytes a second in one direction, as nccl-tests'
    sendrecv has it, added up over the ranks of a pod.
    """
    dist, each = torch.distributed, pod.nproc_per_node
    nodes, node = world // each, rank // each
    received, rounds = torch.empty_like(tensor), list(list_rounds(nodes))
    # A row for each round, and one more for which pod it is: the group's order need not be that of the pods.
    table = torch.zeros(len(rounds) + 1, nodes, device=tensor.device, dtype=torch.float64)
    table[-1, node] = pod.node / each
    for number, partners in enumerate(rounds):
        partner = partners[node]
        dist.all_reduce(torch.ones(1, device=tensor.device))  # all begin together
        if partner is None:
            continue
        peer = partner * each + rank % each

        def exchange(peer: int = peer) -> None:
            sends = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
            for one in dist.batch_isend_irecv(sends):
                one.wait()

        measure(exchange)
        table[number, node] = tensor.nbytes / min(measure(exchange) for _ in range(_REPEATS))
    dist.all_reduce(table)
    *rates, pods = table.tolist()
    return list_pairs(rounds, rates, pods)


def list_pairs(
    rounds: Sequence[Sequence[Optional[int]]], rates: Sequence[Sequence[float]], pods: Sequence[float]
) -> list[tuple[int, int, float]]:
    """Return each pair that has met, as (pod, pod, bytes a second of the slower direction).

    ``rounds`` and ``rates``: partner and bytes a second by round and node; ``pods``: the pods' indexes by node.
    """
    return [
        (round(pods[one]), round(pods[other]), min(rates[number][one], rates[number][other]))
        for number, partners in enumerate(rounds)
        for one, other in enumerate(partners)
        if other is not None and one < other
    ]


def list_rounds(nodes: int) -> Iterator[list[Optional[int]]]:
    """Yield for each round the partner of every node; None: it pauses. No two meet twice, all meet where they are few.

    The circle method for round-robin tournaments (Kirkman, 1847): all but one sit in a circle, and in round r those
    meet whose places add up to r.
    """
    circle = nodes - 1 + nodes % 2
    for number in range(min(circle, _MOST_ROUNDS)):
        partners: list[Optional[int]] = [(number - node) % circle for node in range(circle)]
        (alone,) = (node for node in range(circle) if partners[node] == node)
        partners[alone] = None if nodes % 2 else circle
        yield partners if nodes % 2 else [*partners, alone]


def is_sum(found: float, ranks: int, times: int) -> bool:
    """Tell whether a one has become what it must by being summed over all ranks so many times.

    It is rounded to 24 bits in between, by far less than a missing rank would change it.
    """
    return math.isclose(found, float(ranks) ** times, rel_tol=min(1e-3, 2 / ranks))


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, errors="replace") as log:
        return log.read(_LOG_BYTES)
    return ""
