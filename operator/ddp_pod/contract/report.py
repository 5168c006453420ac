"""The report of a pod: one JSON object, which the launcher serves at ``/report`` (docs/pod-contract.md).

The launcher builds it for each request. The operator and the commands read it, and `/metrics` is written from it.
"""

from dataclasses import dataclass

from .group_facts import GroupFacts
from .pod_end import InputReport
from .records import items, text
from .run_report import RunReport


@dataclass(frozen=True)
class PreflightResult:
    """The checks before training. Times are the longest ones, in seconds; rates are in bytes a second."""

    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    dns_seconds: float | None = None
    tcp_seconds: float | None = None
    all_reduce_seconds: float | None = None
    all_reduce_rate: float | None = None
    transport: str = text(40)
    gpu_direct: bool | None = None
    pair: tuple[int, ...] = items(2)
    """The indexes of the slowest pair of pods."""
    pair_rate: float | None = None


@dataclass(frozen=True)
class MemoryCopies:
    """The copies of checkpoints in the pod's memory. ``step``, ``time``: of the newest one."""

    step: float = 0.0
    time: float = 0.0
    bytes: float = 0.0
    saves: float = 0.0
    stalled_seconds: float = 0.0


@dataclass(frozen=True)
class TrackedRun:
    """The job's run in an experiment tracker, and its web page."""

    tracker: str = text(40)
    url: str = text(200)


@dataclass(frozen=True)
class PodReport(RunReport):
    """What one pod reports while it runs, with the parts of features."""

    preflight: PreflightResult | None = None
    memory: MemoryCopies | None = None
    runs: tuple[TrackedRun, ...] = items(4)
    inputs: tuple[InputReport, ...] = ()
    """Of a pod that fetches spec.inputs."""
    groups: GroupFacts | None = None
