"""The preflight: what the ranks will need from the network, tried before they start."""

import re
import socket
import time
from statistics import median
from typing import Any, Callable, Iterable, Mapping, Sequence

from .contract import (
    EXIT_RETRYABLE,
    METRIC_ALL_REDUCE_RATE,
    METRIC_NETWORK,
    METRIC_PREFLIGHT_PASSED,
    METRIC_PREFLIGHT_SECONDS,
    METRIC_SLOWEST_PAIR,
    PREFLIGHT_CHECKS,
)
from .failure_record import KnownFailure
from .failure_table import NCCL, NETWORK, Category, Outcome
from .failure_text import FABRIC_REMEDY
from .nccl_log import SOCKET
from .pod import Pod, PreflightConfig
from .probe import measure_network

_BETWEEN_RANKS = ("allreduce", "transport", "pairs")


class PreflightError(KnownFailure):
    """A check has failed and spec.preflight.mode is Fail, or spec.network.require is set.

    ``problems``: the fatal ones by check; ``report``: of ``run_preflight``.
    """

    def __init__(self, problems: Mapping[str, str], report: Mapping[str, Any]) -> None:
        category = _find_category(problems, report)
        remedy = FABRIC_REMEDY if "transport" in problems else category.remedy
        text = "; ".join(f"{check}: {problem}" for check, problem in problems.items())
        super().__init__(f"the preflight failed: {text}", Outcome(category.name, EXIT_RETRYABLE), remedy)


def _find_category(problems: Mapping[str, str], report: Mapping[str, Any]) -> Category:
    """Return NCCL where NCCL itself failed, or where its log names no transport."""
    by_nccl = "allreduce" in problems and report["nccl_failed"]
    unnamed = "transport" in problems and report["transport"] is None
    return NCCL if by_nccl or unnamed else NETWORK


def find_partners(pod: Pod) -> list[tuple[str, int]]:
    """Return what this pod must reach: the rendezvous on pod 0, and the metrics page of the next pod by index."""
    partners = [(pod.master, pod.port)]
    if not pod.local and pod.nodes > 1:
        following = (pod.node + 1) % pod.nodes
        partners.append((re.sub(r"-0(?=\.|$)", f"-{following}", pod.master, count=1), pod.metrics_port))
    return partners


def try_dns(hosts: Iterable[str]) -> float:
    """Resolve names. Returns the longest time, seconds. Raises: OSError that names the host."""
    return max(
        (_time(f"{host} does not resolve", socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM) for host in hosts),
        default=0.0,
    )


def try_tcp(partners: Iterable[tuple[str, int]]) -> float:
    """Connect. Returns the longest time, seconds. Raises: OSError that names the address."""
    words = "no connection to {}:{}"
    return max((_time(words.format(*one), _connect, one) for one in partners), default=0.0)


def _connect(address: tuple[str, int]) -> None:
    socket.create_connection(address, timeout=10).close()


def _time(problem: str, attempt: Callable[..., Any], *arguments: Any) -> float:
    """Return how long an attempt takes. Raises: OSError that begins with ``problem``."""
    start = time.monotonic()
    try:
        attempt(*arguments)
    except OSError as error:
        raise OSError(f"{problem}: {error.strerror or error}") from None
    return time.monotonic() - start


def run_preflight(torch: Any, pod: Pod, plan: PreflightConfig, ranks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Make the checks. Returns seconds and problems by check, the all-reduce's rate, what carries data between pods
    (``transport``, ``direct``; None: nothing does) and the slowest pair of them (pod, pod, bytes a second)."""
    report: dict[str, Any] = {
        "seconds": {},
        "problems": {},
        "rate": None,
        "transport": None,
        "direct": None,
        "pair": None,
        "nccl_failed": False,
    }
    seconds, problems = report["seconds"], report["problems"]
    partners = find_partners(pod) if pod.nodes > 1 else []
    for check in plan.checks:
        try:
            if check == "dns" and partners:
                seconds[check] = try_dns(host for host, _ in partners)
            elif check == "tcp" and partners:
                seconds[check] = try_tcp(partners)
        except OSError as error:
            problems[check] = str(error)
    if ranks[0][2] > 1 and not {"allreduce", "pairs"}.isdisjoint(plan.checks):
        try:
            figures = measure_network(torch, pod, ranks, "pairs" in plan.checks)
        except OSError as error:
            problems["allreduce"] = str(error)
            report["nccl_failed"] = "nccl" in str(error).lower()  # torch's message
        else:
            seconds["allreduce"], report["rate"] = figures["seconds"], figures["rate"]
            _judge(report, figures, plan, across=pod.nodes > 1 and not pod.local)
    return report


def _judge(report: dict[str, Any], figures: dict[str, Any], plan: PreflightConfig, *, across: bool) -> None:
    """Add to a report what the figures between the ranks say, and which will not do. ``across``: there are machines."""
    problems, rate = report["problems"], figures["rate"]
    if rate < plan.min_bytes_per_second:
        problems["allreduce"] = f"{_rate(rate)}, below the required {_rate(plan.min_bytes_per_second)}"
    transport = figures["transport"]
    if transport:
        report["transport"], report["direct"] = transport, figures["direct"]
        wanted = " or ".join(plan.transports) or ("anything but sockets" if plan.require else "")
        if wanted and (transport not in plan.transports if plan.transports else transport == SOCKET):
            reason = f" ({figures['reason']})" if figures["reason"] else ""
            problems["transport"] = f"traffic between pods uses {transport}{reason}; spec.network asks for {wanted}"
    elif plan.require and across:
        problems["transport"] = (
            "NCCL's log does not say which transport it uses, and spec.network.require needs to know"
        )
    pairs = figures.get("pairs")
    if pairs:
        report["pair"] = one, other, least = min(pairs, key=lambda pair: pair[2])
        if least < plan.min_pair_bytes_per_second:
            problems["pairs"] = (
                f"pods {one} and {other} exchange {_rate(least)}, below the required "
                f"{_rate(plan.min_pair_bytes_per_second)}; the median of {len(pairs)} pairs is "
                f"{_rate(median(pair[2] for pair in pairs))}{_blame(pairs, plan.min_pair_bytes_per_second)}"
            )


def _blame(pairs: Sequence[tuple[int, int, float]], required: float) -> str:
    """Return in words which pod is slow with each of its partners, where it is one of the two: the node is to blame."""
    fast = {pod for one, other, rate in pairs if rate >= required for pod in (one, other)}
    slow = sorted({pod for one, other, _ in pairs for pod in (one, other)} - fast)
    return f"; pod {slow[0]} is slow with each other pod that was tried" if fast and len(slow) == 1 else ""


def find_fatal(report: dict[str, Any], plan: PreflightConfig) -> dict[str, str]:
    """Return the problems that end the pod: all by spec.preflight, and those between ranks by spec.network.require."""
    return {
        check: text
        for check, text in report["problems"].items()
        if (plan.fail and check != "transport") or (plan.require and check in _BETWEEN_RANKS)
    }


def describe_preflight(report: dict[str, Any]) -> str:
    """Return the preflight's result in one line, and one for each problem."""
    figures = [f"{check} {1000 * seconds:.1f} ms" for check, seconds in report["seconds"].items()]
    if report["rate"] is not None:
        figures.append(f"all-reduce {_rate(report['rate'])}")
    if report["transport"]:
        figures.append(f"over {report['transport']}{' with GPUDirect' if report['direct'] else ''}")
    if report["pair"]:
        one, other, rate = report["pair"]
        figures.append(f"slowest pair of pods {one} and {other}: {_rate(rate)}")
    problems = [f"preflight: {check} failed: {text}" for check, text in report["problems"].items()]
    return "\n".join([f"preflight: {', '.join(figures) or 'nothing measured'}", *problems])


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s"


def build_preflight_rows(report: dict[str, Any]) -> list[str]:
    """Return the preflight's series; none before it was made."""
    if not report:
        return []
    seconds, problems, rows = report["seconds"], report["problems"], []

    def add(name: str, words: str, samples: Iterable[str]) -> None:
        rows.extend([f"# HELP {name} {words}", f"# TYPE {name} gauge", *(f"{name}{sample}" for sample in samples)])

    made = [check for check in PREFLIGHT_CHECKS if check in seconds or check in problems]
    passed = (f'{{check="{one}"}} {int(one not in problems)}' for one in made)
    add(METRIC_PREFLIGHT_PASSED, "Whether a check before training went well.", passed)
    longest = (f'{{check="{one}"}} {value:.6f}' for one, value in seconds.items())
    add(METRIC_PREFLIGHT_SECONDS, "The longest lookup, connection, or all-reduce of one number.", longest)
    if report["rate"] is not None:
        words = "Bus bandwidth of an all-reduce over all ranks before training."
        add(METRIC_ALL_REDUCE_RATE, words, [f" {report['rate']:.0f}"])
    if report["transport"]:
        labels = f'{{transport="{report["transport"]}",gpu_direct="{str(report["direct"]).lower()}"}} 1'
        add(METRIC_NETWORK, "The transport that NCCL or gloo uses between pods.", [labels])
    if report["pair"]:
        one, other, rate = report["pair"]
        words = "Bandwidth of the slowest pair of pods before training, in one direction."
        add(METRIC_SLOWEST_PAIR, words, [f'{{pods="{one},{other}"}} {rate:.0f}'])
    return rows
