"""The preflight: checks of the network before the ranks start."""

import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ...base.known_failure import KnownFailure
from ...base.pod import Pod
from ...contract.failure_table import NCCL, NETWORK, Category, Outcome
from ...contract.names import EXIT_RETRYABLE, PREFLIGHT_CHECKS
from ...contract.plan import PreflightConfig
from ...contract.report import PreflightResult
from .nccl_log import SOCKET
from .probe import PairRate, ProbeResult, measure_network

_FABRIC_REMEDY = (
    "check that the node has the network's devices, the pod requests them, and the image has their NCCL plugin "
    "(docs/scaling.md); without spec.preflight.require the job trains on any transport"
)
_CHECKS_BETWEEN_RANKS = ("allreduce", "transport", "pairs")
_CONNECT_SECONDS = 10


class PreflightReport(NamedTuple):
    """Results of the checks. ``seconds``, ``problems``: by check; ``rate``: of an all-reduce, bytes a second.

    ``transport``, ``direct``: of the data between pods, see ``CommunicatorNetwork``; None if no data flows there.
    ``pair``: the slowest pair of pods. ``nccl_failed``: whether NCCL itself failed the all-reduce.
    """

    seconds: dict[str, float]
    problems: dict[str, str]
    rate: float | None = None
    transport: str | None = None
    direct: bool | None = None
    pair: PairRate | None = None
    nccl_failed: bool = False


class PreflightDone(NamedTuple):
    """From the agent: the result."""

    report: PreflightReport


class PreflightError(KnownFailure):
    """A check has failed and spec.preflight.mode is Fail, or spec.preflight.require is set.

    ``problems``: the fatal ones by check; ``report``: of ``run_preflight``.
    """

    def __init__(self, problems: Mapping[str, str], report: PreflightReport) -> None:
        category = _find_category(problems, report)
        remedy = _FABRIC_REMEDY if "transport" in problems else category.remedy
        text = "; ".join(f"{check}: {problem}" for check, problem in problems.items())
        super().__init__(f"the preflight failed: {text}", Outcome(category.name, EXIT_RETRYABLE), remedy)


def _find_category(problems: Mapping[str, str], report: PreflightReport) -> Category:
    """Return NCCL if NCCL itself failed or its log names no transport; otherwise NETWORK."""
    by_nccl = "allreduce" in problems and report.nccl_failed
    unnamed = "transport" in problems and report.transport is None
    return NCCL if by_nccl or unnamed else NETWORK


def find_partners(pod: Pod) -> list[tuple[str, int]]:
    """Return the addresses that this pod must reach: the rendezvous on pod 0, and the next pod's metrics page.

    In a job whose membership changes, the next pod may not exist: its ranks check each other by the all-reduce.
    """
    partners = [(pod.master, pod.port)]
    if not (pod.local or pod.regroups):
        next_node = (pod.node + 1) % pod.nodes
        partners.append((re.sub(r"-0(?=\.|$)", f"-{next_node}", pod.master, count=1), pod.metrics_port))
    return partners


def _resolve(host: str, port: int) -> None:
    """Resolve a name. Raises: OSError that names it."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"{host} does not resolve: {error.strerror or error}") from None


def _connect(host: str, port: int) -> None:
    """Connect to an address. Raises: OSError that names it."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(f"no connection to {host}:{port}: {error.strerror or error}") from None


_CHECKS_OF_PARTNERS: Mapping[str, Callable[[str, int], None]] = {"dns": _resolve, "tcp": _connect}


def _measure_longest(check: Callable[[str, int], None], partners: Iterable[tuple[str, int]]) -> float:
    """Return the longest time that a check of a partner takes, in seconds. Raises: OSError."""
    longest = 0.0
    for host, port in partners:
        start = time.monotonic()
        check(host, port)
        longest = max(longest, time.monotonic() - start)
    return longest


def run_preflight(
    torch: Any, pod: Pod, plan: PreflightConfig, ranks: Sequence[tuple[int, int, int]]
) -> PreflightReport:
    """Run the checks. ``ranks``: (local rank, rank, world size) of this pod's ranks."""
    report = PreflightReport(seconds={}, problems={})
    world_size = ranks[0][2]
    partners = find_partners(pod) if world_size > len(ranks) else []
    for name, check in _CHECKS_OF_PARTNERS.items():
        if name not in plan.checks or not partners:
            continue
        try:
            report.seconds[name] = _measure_longest(check, partners)
        except OSError as error:
            report.problems[name] = str(error)

    if world_size == 1 or {"allreduce", "pairs"}.isdisjoint(plan.checks):
        return report
    try:
        result = measure_network(torch, pod, ranks, "pairs" in plan.checks)
    except OSError as error:
        report.problems["allreduce"] = str(error)
        return report._replace(nccl_failed="nccl" in str(error).lower())  # torch's message
    report.seconds["allreduce"] = result.seconds
    report.problems.update(_find_problems(result, plan, across_machines=pod.nodes > 1 and not pod.local))
    return report._replace(
        rate=result.rate,
        transport=result.transport or None,
        direct=result.direct if result.transport else None,
        pair=_find_slowest(result.pairs),
    )


def _find_problems(result: ProbeResult, plan: PreflightConfig, *, across_machines: bool) -> dict[str, str]:
    """Return the violated requirements by check."""
    problems = {}
    if result.rate < plan.min_bytes_per_second:
        required = _format_rate(plan.min_bytes_per_second)
        problems["allreduce"] = f"{_format_rate(result.rate)}, below the required {required}"
    transport_problem = _check_transport(result, plan, across_machines=across_machines)
    if transport_problem:
        problems["transport"] = transport_problem
    slowest = _find_slowest(result.pairs)
    if slowest is not None and slowest.rate < plan.min_pair_bytes_per_second:
        problems["pairs"] = _describe_slow_pair(slowest, result.pairs, plan.min_pair_bytes_per_second)
    return problems


def _check_transport(result: ProbeResult, plan: PreflightConfig, *, across_machines: bool) -> str:
    """Return the violation of spec.preflight.transports by the transport between pods; empty if there is none."""
    if not result.transport:
        if plan.require and across_machines:
            return "NCCL's log does not name the transport, which spec.preflight.require needs"
        return ""
    if plan.transports:
        accepted = result.transport in plan.transports
        required = " or ".join(plan.transports)
    else:
        accepted = not plan.require or result.transport != SOCKET
        required = "anything but sockets"
    if accepted:
        return ""
    reason = f" ({result.reason})" if result.reason else ""
    return f"traffic between pods uses {result.transport}{reason}; spec.preflight requires {required}"


def _find_slowest(pairs: Sequence[PairRate]) -> PairRate | None:
    return min(pairs, key=lambda pair: pair.rate, default=None)


def _describe_slow_pair(slowest: PairRate, pairs: Sequence[PairRate], required: float) -> str:
    median_rate = median(pair.rate for pair in pairs)
    message = (
        f"pods {slowest.pod} and {slowest.peer} exchange {_format_rate(slowest.rate)}, below the required "
        f"{_format_rate(required)}; the median of {len(pairs)} pairs is {_format_rate(median_rate)}"
    )
    slow_pod = _find_slow_pod(pairs, required)
    if slow_pod is not None:
        message += f"; pod {slow_pod} is slow with all its partners"
    return message


def _find_slow_pod(pairs: Sequence[PairRate], required: float) -> int | None:
    """Return the pod that is slow with each of its partners, if it is the only one: its node is the root cause."""
    pods: set[int] = set()
    fast_pods: set[int] = set()
    for pair in pairs:
        pods.update((pair.pod, pair.peer))
        if pair.rate >= required:
            fast_pods.update((pair.pod, pair.peer))
    slow_pods = pods - fast_pods
    return slow_pods.pop() if fast_pods and len(slow_pods) == 1 else None


def find_fatal(report: PreflightReport, plan: PreflightConfig) -> dict[str, str]:
    """Return the problems that end the pod: by spec.preflight any, by spec.preflight.require those between ranks."""
    fatal = {}
    for check, problem in report.problems.items():
        fails_preflight = plan.fail and check != "transport"
        violates_network = plan.require and check in _CHECKS_BETWEEN_RANKS
        if fails_preflight or violates_network:
            fatal[check] = problem
    return fatal


def describe_preflight(report: PreflightReport) -> str:
    """Return one line with the measurements, and one for each problem."""
    measurements = [f"{check} {1000 * seconds:.1f} ms" for check, seconds in report.seconds.items()]
    if report.rate is not None:
        measurements.append(f"all-reduce {_format_rate(report.rate)}")
    if report.transport:
        measurements.append(f"over {report.transport}{' with GPUDirect' if report.direct else ''}")
    if report.pair:
        pair = report.pair
        measurements.append(f"slowest pair of pods {pair.pod} and {pair.peer}: {_format_rate(pair.rate)}")
    problems = [f"preflight: {check} failed: {problem}" for check, problem in report.problems.items()]
    return "\n".join([f"preflight: {', '.join(measurements) or 'nothing measured'}", *problems])


def _format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s"


def summarize_preflight(report: PreflightReport | None) -> PreflightResult | None:
    """Return what the pod reports about the checks; None before they have run."""
    if report is None:
        return None
    pair = report.pair
    return PreflightResult(
        done=tuple(check for check in PREFLIGHT_CHECKS if check in report.seconds or check in report.problems),
        failed=tuple(check for check in PREFLIGHT_CHECKS if check in report.problems),
        dns_seconds=report.seconds.get("dns"),
        tcp_seconds=report.seconds.get("tcp"),
        all_reduce_seconds=report.seconds.get("allreduce"),
        all_reduce_rate=report.rate,
        transport=report.transport or "",
        gpu_direct=report.direct,
        pair=(pair.pod, pair.peer) if pair else (),
        pair_rate=pair.rate if pair else None,
    )
