"""The preflight: what the ranks will need from the network, tried before they start."""

import json
import math
import os
import re
import select
import signal
import socket
import time
from typing import Any, Callable, Iterable, Optional, Sequence

from .contract import METRIC_ALL_REDUCE_RATE, METRIC_PREFLIGHT_PASSED, METRIC_PREFLIGHT_SECONDS, PREFLIGHT_CHECKS
from .pod import Pod, PreflightConfig
from .processes import die_with, kill

_PROBE_SECONDS = 60.0
_PROBE_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_PROBE_REPEATS = 3


class PreflightError(Exception):
    """A check has failed and spec.preflight.mode is Fail."""


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


def try_all_reduce(torch: Any, pod: Pod, ranks: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    """All-reduce over all ranks, in children of this process. ``ranks``: (local rank, rank, world size) of this pod's.

    Returns seconds for a single number and bytes a second for a large tensor. Raises: OSError.
    """
    children: dict[int, int] = {}
    for one in ranks:
        result, result_end = os.pipe()
        pid = os.fork()
        if not pid:
            outcome: dict[str, Any] = {"problem": "the probe ended without a result"}
            try:
                die_with(os.getppid())
                os.close(result)
                outcome = _all_reduce(torch, pod, *one)
            except BaseException as error:
                outcome = {"problem": f"{type(error).__name__}: {str(error)[:500]}"}
            finally:
                os.write(result_end, json.dumps(outcome).encode())
                os._exit(0)
        os.close(result_end)
        children[result] = pid
    deadline = time.monotonic() + _PROBE_SECONDS + 10
    figures: list[dict[str, Any]] = []
    for result, pid in children.items():
        ready = select.select([result], [], [], max(0.0, deadline - time.monotonic()))[0]
        text = os.read(result, 4096) if ready else b'{"problem": "no result in time"}'
        figures.append(json.loads(text or b'{"problem": "the probe was killed"}'))
        os.close(result)
        kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    problems = [one["problem"] for one in figures if "problem" in one]
    if problems:
        raise OSError(f"all-reduce of all ranks: {problems[0]}")
    return {key: max(one[key] for one in figures) for key in ("seconds", "rate")}


def _all_reduce(torch: Any, pod: Pod, local_rank: int, rank: int, world: int) -> dict[str, float]:
    """Measure as one rank."""
    import datetime

    dist = torch.distributed
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    limit = datetime.timedelta(seconds=_PROBE_SECONDS)
    if world == pod.nproc_per_node:
        store = dist.FileStore(os.path.join(pod.runtime, "preflight"), world)
    else:
        host = "localhost" if pod.node == 0 else pod.master
        store = dist.TCPStore(host, pod.port, None, False, timeout=limit)
    dist.init_process_group(
        backend, store=dist.PrefixStore("preflight", store), rank=rank, world_size=world, timeout=limit
    )

    def measure(tensor: Any) -> float:
        start = time.monotonic()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.monotonic() - start

    number = torch.ones(1, device=device)
    large = torch.ones(_PROBE_BYTES[backend] // 4, device=device)
    measure(large)  # connections are made at the first use
    seconds = min(measure(number) for _ in range(_PROBE_REPEATS))
    fastest = min(measure(large) for _ in range(_PROBE_REPEATS))
    if not is_sum(float(large[0]), world, _PROBE_REPEATS + 1):
        raise OSError(f"a wrong sum: {float(large[0])}")
    # Each rank sends and receives this share of the data in a ring, which makes figures of all sizes comparable.
    return {"seconds": seconds, "rate": _PROBE_BYTES[backend] * 2 * (world - 1) / max(1, world) / fastest}


def is_sum(found: float, ranks: int, times: int) -> bool:
    """Tell whether a one has become what it must by being summed over all ranks so many times.

    It is rounded to 24 bits in between, by far less than a missing rank would change it.
    """
    return math.isclose(found, float(ranks) ** times, rel_tol=min(1e-3, 2 / ranks))


def run_preflight(torch: Any, pod: Pod, plan: PreflightConfig, ranks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Make the checks. Returns seconds by check, the all-reduce's rate, and the problems by check."""
    seconds: dict[str, float] = {}
    problems: dict[str, str] = {}
    rate: Optional[float] = None
    partners = find_partners(pod)
    for check in plan.checks:
        if pod.nodes == 1 and check != "allreduce":
            continue  # nobody to reach
        try:
            if check == "dns":
                seconds[check] = try_dns(host for host, _ in partners)
            elif check == "tcp":
                seconds[check] = try_tcp(partners)
            elif ranks[0][2] > 1:
                figures = try_all_reduce(torch, pod, ranks)
                seconds[check], rate = figures["seconds"], figures["rate"]
                least = plan.min_bytes_per_second
                if rate < least:
                    problems[check] = f"{rate / 1e6:.0f} MB/s, below the required {least / 1e6:.0f} MB/s"
        except OSError as error:
            problems[check] = str(error)
    return {"seconds": seconds, "rate": rate, "problems": problems}


def describe_preflight(report: dict[str, Any]) -> str:
    """Return the preflight's result in one line, and one for each problem."""
    figures = [f"{check} {1000 * seconds:.1f} ms" for check, seconds in report["seconds"].items()]
    if report["rate"] is not None:
        figures.append(f"all-reduce {report['rate'] / 1e6:.0f} MB/s")
    problems = [f"preflight: {check} failed: {text}" for check, text in report["problems"].items()]
    return "\n".join([f"preflight: {', '.join(figures) or 'nothing measured'}", *problems])


def build_preflight_rows(report: dict[str, Any]) -> list[str]:
    """Return the preflight's series; none before it was made."""
    if not report:
        return []
    checks = [check for check in PREFLIGHT_CHECKS if check in report["seconds"] or check in report["problems"]]
    rows = [f"# HELP {METRIC_PREFLIGHT_PASSED} Whether a check before training went well."]
    rows.append(f"# TYPE {METRIC_PREFLIGHT_PASSED} gauge")
    rows += [f'{METRIC_PREFLIGHT_PASSED}{{check="{one}"}} {int(one not in report["problems"])}' for one in checks]
    rows.append(f"# HELP {METRIC_PREFLIGHT_SECONDS} The longest lookup, connection, or all-reduce of one number.")
    rows.append(f"# TYPE {METRIC_PREFLIGHT_SECONDS} gauge")
    rows += [f'{METRIC_PREFLIGHT_SECONDS}{{check="{one}"}} {value:.6f}' for one, value in report["seconds"].items()]
    if report["rate"] is not None:
        rows.append(f"# HELP {METRIC_ALL_REDUCE_RATE} Bus bandwidth of an all-reduce over all ranks before training.")
        rows += [f"# TYPE {METRIC_ALL_REDUCE_RATE} gauge", f"{METRIC_ALL_REDUCE_RATE} {report['rate']:.0f}"]
    return rows
