"""The probe: measure the network between ranks in children of the agent that exit before the ranks start."""

import contextlib
import datetime
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from ...base.pod import Pod
from ...contract.processes import kill, set_parent_death_signal
from .nccl_log import SOCKET, CommunicatorNetwork, read_network

_SECONDS = 60.0
_SECONDS_TO_FINISH = 10.0  # beyond the timeouts of the operations
_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_REPEATS = 3
_MAX_ROUNDS = 8
_LOG_BYTES = 4 << 20
_PROBLEM_LIMIT = 500  # characters


class PairRate(NamedTuple):
    """Bytes a second between two pods, in the slower direction."""

    pod: int
    peer: int
    rate: float


class ProbeResult(NamedTuple):
    """The measurements of one rank, or of all ranks of a pod.

    ``seconds``: of an all-reduce of one number; ``rate``: bytes a second of one of a large tensor; ``transport``,
    ``direct``, ``reason``: see ``CommunicatorNetwork``. ``problem``: why there is no measurement.
    """

    seconds: float = 0.0
    rate: float = 0.0
    transport: str = ""
    direct: bool = False
    reason: str = ""
    pairs: Sequence[PairRate] = ()
    problem: str = ""


class _Place(NamedTuple):
    """A rank of this pod."""

    local_rank: int
    rank: int
    world_size: int


def measure_network(torch: Any, pod: Pod, ranks: Sequence[tuple[int, int, int]], pairs: bool) -> ProbeResult:
    """Measure all-reduces over all ranks and, if ``pairs``, the exchange of every two pods.

    ``ranks``: (local rank, rank, world size) of this pod's ranks. Raises: OSError.
    """
    children: dict[int, int] = {}
    for rank in ranks:
        result, result_end = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(result)
            _measure_and_exit(torch, pod, _Place(*rank), pairs, result_end)
        os.close(result_end)
        children[result] = pid

    deadline = time.monotonic() + _SECONDS + _SECONDS_TO_FINISH
    results = []
    for result, pid in children.items():
        results.append(read_result(result, deadline))
        os.close(result)
        kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return sum_up(results)


def _measure_and_exit(torch: Any, pod: Pod, place: _Place, pairs: bool, result_end: int) -> NoReturn:
    """Measure in a forked child and write the result as JSON."""
    result = ProbeResult(problem="the probe exited without a result")
    log = os.path.join(pod.runtime, f"nccl-{place.local_rank}.log")
    try:
        set_parent_death_signal(os.getppid())
        result = _measure(torch, pod, place, pairs, log)
    except BaseException as error:
        reason = read_network(_read_log(log)).reason
        problem = f"{type(error).__name__}: {str(error)[:_PROBLEM_LIMIT]}"
        result = ProbeResult(problem=f"{problem} (NCCL: {reason})" if reason else problem)
    finally:
        with contextlib.suppress(OSError), open(result_end, "w") as pipe:  # the agent has ended
            json.dump(result._asdict(), pipe)
        os._exit(0)


def read_result(pipe: int, deadline: float) -> ProbeResult:
    """Return the result that a child writes before it closes the pipe. ``deadline``: of the monotonic clock."""
    text = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            return _decode_result(text)
        text += part
    return ProbeResult(problem="no result in time")


def _decode_result(text: bytes) -> ProbeResult:
    try:
        raw = json.loads(text)
    except ValueError:  # empty or cut off
        return ProbeResult(problem="the probe was killed")
    raw["pairs"] = [PairRate(*pair) for pair in raw["pairs"]]
    return ProbeResult(**raw)


def sum_up(results: Sequence[ProbeResult]) -> ProbeResult:
    """Return a pod's result: the longest time, and the network of the rank with the slowest one.

    Raises: OSError if a rank's measurement failed.
    """
    for result in results:
        if result.problem:
            raise OSError(f"all-reduce of all ranks: {result.problem}")
    # A rank without a neighbour in another pod has no network.
    networked = [result for result in results if result.transport]
    slowest = min(networked or results, key=lambda result: (result.transport != SOCKET, result.direct))
    return results[0]._replace(
        seconds=max(result.seconds for result in results),
        rate=max(result.rate for result in results),
        transport=slowest.transport,
        direct=slowest.direct,
        reason=slowest.reason,
    )


def _measure(torch: Any, pod: Pod, place: _Place, pairs: bool, log: str) -> ProbeResult:
    """Measure as one rank."""
    dist = torch.distributed
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > place.local_rank
    backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", place.local_rank) if on_gpu else torch.device("cpu")
    is_single_pod = place.world_size == pod.nproc_per_node
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,ENV,P2P", NCCL_DEBUG_FILE=log)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("preflight", create_store(dist, pod, place.world_size)),
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )

    def measure(action: Callable[[], Any]) -> float:
        start = time.monotonic()
        action()
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.monotonic() - start

    number = torch.ones(1, device=device)
    large = torch.ones(_BYTES[backend] // 4, device=device)
    measure(lambda: dist.all_reduce(large))  # the first call opens the connections
    seconds = min(measure(lambda: dist.all_reduce(number)) for _ in range(_REPEATS))
    fastest = min(measure(lambda: dist.all_reduce(large)) for _ in range(_REPEATS))
    if not is_sum(float(large[0]), place.world_size, _REPEATS + 1):
        raise OSError(f"a wrong sum: {float(large[0])}")

    if is_single_pod:
        network = CommunicatorNetwork()
    elif on_gpu:
        network = read_network(_read_log(log))
    else:
        network = CommunicatorNetwork(SOCKET, reason="the ranks have no GPU: gloo uses TCP")
    pair_rates = []
    if pairs and not is_single_pod:
        pair_rates = _measure_pairs(torch, pod, place, large, measure)
    # In a ring each rank sends and receives this share of the data, so that rates of all sizes are comparable.
    share = 2 * (place.world_size - 1) / max(1, place.world_size)
    return ProbeResult(
        seconds=seconds,
        rate=_BYTES[backend] * share / fastest,
        transport=network.transport,
        direct=network.direct,
        reason=network.reason,
        pairs=pair_rates,
    )


def create_store(dist: Any, pod: Pod, world_size: int) -> Any:
    """Return the store of the measuring ranks: the rendezvous store, or a file if one pod has all ranks."""
    if world_size == pod.nproc_per_node:
        return dist.FileStore(os.path.join(pod.runtime, "preflight"), world_size)
    return dist.TCPStore(pod.store_host, pod.port, None, False, timeout=datetime.timedelta(seconds=_SECONDS))


def _measure_pairs(
    torch: Any, pod: Pod, place: _Place, tensor: Any, measure: Callable[[Callable[[], Any]], float]
) -> list[PairRate]:
    """Exchange tensors between every two pods, all pairs of a round at the same time.

    All ranks of a pair send to and receive from their counterparts: bytes a second in one direction as in nccl-tests'
    sendrecv, summed over the ranks of a pod.
    """
    dist = torch.distributed
    nproc = pod.nproc_per_node
    nodes = place.world_size // nproc
    node = place.rank // nproc
    received = torch.empty_like(tensor)
    rounds = list(list_rounds(nodes))
    # A row for each round, and a last one with the pods' indexes: the order of the group may be another one.
    table = torch.zeros(len(rounds) + 1, nodes, device=tensor.device, dtype=torch.float64)
    table[-1, node] = pod.node / nproc
    for number, partners in enumerate(rounds):
        partner = partners[node]
        dist.all_reduce(torch.ones(1, device=tensor.device))  # all ranks start the round together
        if partner is None:
            continue
        peer = partner * nproc + place.rank % nproc

        def exchange(peer: int = peer) -> None:
            operations = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
            for request in dist.batch_isend_irecv(operations):
                request.wait()

        measure(exchange)
        table[number, node] = tensor.nbytes / min(measure(exchange) for _ in range(_REPEATS))
    dist.all_reduce(table)
    *rates, pods = table.tolist()
    return list_pairs(rounds, rates, pods)


def list_pairs(
    rounds: Sequence[Sequence[int | None]], rates: Sequence[Sequence[float]], pods: Sequence[float]
) -> list[PairRate]:
    """Return the pairs of all rounds with the rate of the slower direction.

    ``rounds`` and ``rates``: partner and bytes a second by round and node; ``pods``: the pods' indexes by node.
    """
    pairs = []
    for number, partners in enumerate(rounds):
        for node, partner in enumerate(partners):
            if partner is not None and node < partner:
                rate = min(rates[number][node], rates[number][partner])
                pairs.append(PairRate(round(pods[node]), round(pods[partner]), rate))
    return pairs


def list_rounds(nodes: int) -> Iterator[list[int | None]]:
    """Yield the partner of every node for each round, None for a pause. No two nodes are partners twice.

    The circle method for round-robin tournaments (Kirkman, 1847): in round r the partners are the nodes whose numbers
    add up to r, modulo the size of the circle. With few nodes every two are partners once.
    """
    circle = nodes - 1 + nodes % 2
    for number in range(min(circle, _MAX_ROUNDS)):
        partners: list[int | None] = [(number - node) % circle for node in range(circle)]
        (single,) = (node for node in range(circle) if partners[node] == node)
        partners[single] = None if nodes % 2 else circle
        yield partners if nodes % 2 else [*partners, single]


def is_sum(value: float, ranks: int, times: int) -> bool:
    """Return whether 1 becomes ``value`` by summing it over all ranks so many times.

    Intermediate results have 24 bits; the rounding is far smaller than the effect of a missing rank.
    """
    return math.isclose(value, float(ranks) ** times, rel_tol=min(1e-3, 2 / ranks))


def _read_log(path: str) -> str:
    with contextlib.suppress(OSError), open(path, errors="replace") as log:
        return log.read(_LOG_BYTES)
    return ""
