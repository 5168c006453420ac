"""The operator's Prometheus metrics: its own work, and the jobs that it serves.

Label values are bounded: verbs, kinds, statuses, phases, reasons and categories are constants; namespaces have jobs.
"""

from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ddp_operator.api.cluster_errors import ClusterError, VersionConflict
from ddp_operator.api.constants import CONTROLLER_NAME
from ddp_operator.api.faults import FAULTS, FaultLog, contain
from ddp_operator.api.status import Phase
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts, other_reasons
from ddp_operator.decide.transitions import (
    RECOVERY_LEVELS,
    RESTART_CATEGORIES,
    STAGES,
    Doubted,
    Ended,
    Failed,
    NodeFailed,
    Reached,
    Restarted,
    Transition,
    Used,
)
from ddp_pod.contract.failure_table import CATEGORIES

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the number of series

PHASES: Final[tuple[str, ...]] = get_args(Phase)
PENDING: Final = "Pending"
"""The phase of a resource without a status."""
CAUSES: Final = ("Conflict", "Cluster", "Bug")
SHORT: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
LONG: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
OTHER: Final = "Other"
MAX_NODE_LABELS: Final = 1024
NOT_ACCEPTED: Final = "NotAccepted"
"""Reason label of a job whose condition Accepted is not True."""
_SCHEDULED_REASONS: Final = (
    *(
        c.ALL_PODS_SCHEDULED,
        other_reasons.CHANGE_PENDING,
        other_reasons.SIDECAR_RESTARTED,
        c.WAITING_FOR_PODS,
        c.WAITING_FOR_FORMER_PODS,
    ),
    *c.BLOCKING,
)


class _Status(msgspec.Struct):
    phase: str | None = None
    goodput: str | None = None
    nodes: dict[str, int] = {}
    conditions: list[dict[str, Any]] = []


class _Spec(msgspec.Struct, rename="camel"):
    managed_by: str | None = None


class _Resource(msgspec.Struct):
    """The counted fields of a resource. Decoding only these takes some microseconds."""

    metadata: dict[str, Any]
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_DECODER: Final = msgspec.json.Decoder(_Resource)


class JobCollector(Collector):
    """Counts the cached resources at every scrape, so the counts are correct right after a restart."""

    def __init__(self, bodies: Callable[[], Iterable[bytes]]) -> None:
        self._bodies = bodies

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all cached resources."""
        counts = _JobCounts()
        for body in self._bodies():
            with contain("metrics of a job", ""):
                counts.add(body)
        yield _build_gauge("jobs", "Jobs by phase.", "phase", counts.phases)
        yield _build_gauge(
            "waiting_jobs",
            f"Jobs without all of their pods, by the reason of the condition Scheduled; {NOT_ACCEPTED}: Accepted is "
            "not True.",
            "reason",
            counts.waiting,
        )
        yield _build_gauge("nodes", "Desired and ready pods of unfinished jobs.", "state", counts.nodes)
        yield _build_goodput_gauge(counts.goodputs)


class _JobCounts:
    """Counts of resources by namespace and a second label."""

    def __init__(self) -> None:
        self.phases: Count[tuple[str, str]] = Count()
        self.waiting: Count[tuple[str, str]] = Count()
        self.nodes: Count[tuple[str, str]] = Count()
        self.goodputs: dict[str, list[float]] = {}

    def add(self, body: bytes) -> None:
        """Count one resource."""
        try:
            resource = _DECODER.decode(body)
        except msgspec.ValidationError:  # stored under another version of the CRD; its status reports that
            resource = _Resource({})
        if resource.spec.managed_by not in (None, CONTROLLER_NAME):
            return
        namespace = str(resource.metadata.get("namespace", ""))
        status = resource.status
        self.phases[namespace, status.phase if status.phase in PHASES else PENDING] += 1
        if status.phase in ("Running", "Pending", "Restarting", "Held"):
            self._add_active(namespace, status)

    def _add_active(self, namespace: str, status: _Status) -> None:
        for state in ("desired", "ready"):
            self.nodes[namespace, state] += status.nodes.get(state, 0)
        if status.goodput is not None:
            self.goodputs.setdefault(namespace, []).append(_parse_goodput(status.goodput))
        for condition in status.conditions:
            kind = condition.get("type")
            reason = condition.get("reason")
            if kind == c.SCHEDULED and condition.get("status") == "False":
                self.waiting[namespace, reason if reason in _SCHEDULED_REASONS else OTHER] += 1
            if kind == c.ACCEPTED and condition.get("status") != "True":
                self.waiting[namespace, NOT_ACCEPTED] += 1


def _build_gauge(name: str, text: str, label: str, counts: Count[tuple[str, str]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"ddp_operator_{name}", text, labels=("namespace", label))
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    return family


def _build_goodput_gauge(goodputs: dict[str, list[float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "ddp_operator_goodput_ratio",
        "Mean and lowest goodput (metrics.md) of unfinished jobs that have reported steps.",
        labels=("namespace", "of"),
    )
    for namespace, shares in sorted(goodputs.items()):
        family.add_metric((namespace, "mean"), sum(shares) / len(shares))
        family.add_metric((namespace, "lowest"), min(shares))
    return family


def _parse_goodput(text: str) -> float:
    """Return a goodput from 0 to 1; 0 for a text that is not a number."""
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 0.0


class FaultCollector(Collector):
    """The faults that the operator contained."""

    def __init__(self, faults: FaultLog) -> None:
        self._faults = faults

    def collect(self) -> Iterator[Metric]:
        """Yield the counter."""
        family = CounterMetricFamily(
            "ddp_operator_faults",
            "Objects of other owners, and views of a status, that the operator could not read; the log names them.",
            labels=("part",),
        )
        for part, count in sorted(self._faults.counts.copy().items()):
            family.add_metric((part,), count)
        yield family


class OperatorMetrics:
    """The metrics registry, and methods that update it."""

    def __init__(self, queue_depth: Callable[[], float], bodies: Callable[[], Iterable[bytes]] = tuple) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        ProcessCollector(registry=registry)
        registry.register(JobCollector(bodies))
        registry.register(FaultCollector(FAULTS))
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.leads = Gauge("ddp_operator_leader", "1: this operator is the leader, 0: on standby.", registry=registry)
        self.reconcile_seconds = histogram(
            "ddp_operator_reconcile_duration_seconds", "Duration of one reconcile of one resource.", buckets=SHORT
        )
        self.reconcile_errors = counter(
            "ddp_operator_reconcile_errors_total",
            "Failed reconciles, which are retried, by cause: Conflict, Cluster (the API server) or Bug.",
            ["cause"],
        )
        depth = Gauge("ddp_operator_queue_depth", "Resources that wait for a worker.", registry=registry)
        depth.set_function(queue_depth)
        self.api_requests = counter(
            "ddp_operator_api_requests_total",
            "Calls to the API server, without watches.",
            ["verb", "resource", "code"],
        )
        self.create_to_job = histogram(
            "ddp_operator_create_to_job_duration_seconds",
            "From the watch event of a new resource to that of its first Job.",
            buckets=SHORT,
        )
        self.start_to = histogram(
            "ddp_operator_start_to_stage_duration_seconds",
            "From the start or resumption of a first attempt until all ranks have joined, and until its first step.",
            ["stage"],
            buckets=LONG,
        )
        self.restarts = counter(
            "ddp_operator_restarts_total",
            "Restarts by level (process: in the same pods, pod: one pod replaced, group: a new attempt) and category "
            "of the failure; None: a change of size.",
            ["level", "category"],
        )
        self.failures = counter(
            "ddp_operator_failures_total", "Failures by category, with or without a restart.", ["category"]
        )
        self.finished = counter("ddp_operator_finished_jobs_total", "Finished jobs by result.", ["result"])
        self.doubts = counter(
            "ddp_operator_doubtful_successes_total",
            "Jobs that succeeded but may not have trained as intended, by reason of their conditions TrainsAsOne and "
            "TrainingComplete.",
            ["reason"],
        )
        self.gpu_seconds = counter(
            "ddp_operator_gpu_seconds_total",
            "GPU-seconds by purpose: Productive, Waiting, or the cause of lost time (status.usage). Repeated steps "
            "count as productive and as lost. profile: of the jobs, or empty.",
            ["namespace", "profile", "purpose"],
        )
        self.node_failures = counter(
            "ddp_operator_node_failures_total",
            "Failures of jobs with GPUs that a node caused: it was lost, had a GPU error, or was left because of its "
            f"conditions. {OTHER}: nodes beyond {MAX_NODE_LABELS}.",
            ["node"],
        )
        self._node_labels: set[str] = set()
        # Create all known series, so that ``increase()`` includes their first increase.
        for cause in CAUSES:
            self.reconcile_errors.labels(cause)
        for stage in STAGES:
            self.start_to.labels(stage)
        for category in RESTART_CATEGORIES:
            for level in RECOVERY_LEVELS:
                self.restarts.labels(level, category)
        for category in CATEGORIES:
            self.failures.labels(category)
        for result in ("Succeeded", "Failed"):
            self.finished.labels(result)
        for reason in doubts.DOUBTS:
            self.doubts.labels(reason)

    def on_reconcile(self, seconds: float, error: BaseException | None) -> None:
        """Count one reconcile."""
        self.reconcile_seconds.observe(seconds)
        if error is not None:
            if isinstance(error, VersionConflict):
                cause = "Conflict"
            elif isinstance(error, ClusterError):
                cause = "Cluster"
            else:
                cause = "Bug"
            self.reconcile_errors.labels(cause).inc()

    def on_call(self, verb: str, resource: str, code: str) -> None:
        """Count one call to the API server."""
        self.api_requests.labels(verb, resource, code).inc()

    def on_transition(self, namespace: str, transition: Transition) -> None:
        """Count a transition of a job's status."""
        match transition:
            case Failed(category):
                self.failures.labels(category).inc()
            case Restarted(level, category, count):
                self.restarts.labels(level, category).inc(count)
            case Reached(stage, seconds):
                self.start_to.labels(stage).observe(seconds)
            case Ended(result):
                self.finished.labels(result).inc()
            case Doubted(reason):
                self.doubts.labels(reason).inc()
            case NodeFailed(node):
                self.node_failures.labels(self._label_node(node)).inc()
            case Used(purpose, gpu_seconds, profile):
                self.gpu_seconds.labels(namespace, profile, purpose).inc(gpu_seconds)

    def _label_node(self, node: str) -> str:
        """Return the label of a node. Pods report the names, so the number of labels is bounded."""
        if len(self._node_labels) < MAX_NODE_LABELS:
            self._node_labels.add(node)
        return node if node in self._node_labels else OTHER
