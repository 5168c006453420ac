"""What the operator says about itself, as Prometheus series: its own work, and the jobs that it serves.

Labels are bounded: verbs, a few kinds, statuses, phases, reasons and categories that are constants, and the namespaces
that hold jobs.
"""

from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ddp_operator.api.status import Phase
from ddp_operator.cluster import ClusterError, Conflict
from ddp_operator.launcher.failure_table import CATEGORIES
from ddp_operator.status import conditions as c
from ddp_operator.status.transitions import (
    RECOVERY_LEVELS,
    RESTART_CATEGORIES,
    STAGES,
    Ended,
    Failed,
    NodeFailed,
    Reached,
    Restarted,
    Transition,
    Used,
)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads

PHASES: Final[tuple[str, ...]] = get_args(Phase)
PENDING: Final = "Pending"
"""The phase of a resource that nothing has been written about yet."""
CAUSES: Final = ("Conflict", "Cluster", "Bug")
SHORT: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
LONG: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
OTHER: Final = "Other"
MAX_NODE_LABELS: Final = 1024
NOT_ACCEPTED: Final = "NotAccepted"
"""Reason of a job that has begun, or would, and that the operator or the API server refuses to carry on."""


class _Status(msgspec.Struct):
    phase: str | None = None
    goodput: str | None = None
    nodes: dict[str, int] = {}
    conditions: list[dict[str, Any]] = []


class _Resource(msgspec.Struct):
    """As much of a resource as is counted; decoding no more than that takes some microseconds."""

    metadata: dict[str, Any]
    status: _Status = msgspec.field(default_factory=_Status)


_DECODER: Final = msgspec.json.Decoder(_Resource)


class Fleet(Collector):
    """Counts the remembered resources at every scrape: right after a restart, and with no series to forget to lower."""

    def __init__(self, bodies: Callable[[], Iterable[bytes]]) -> None:
        self._bodies = bodies

    def collect(self) -> Iterator[Metric]:
        """Count."""
        phases: Count[tuple[str, str]] = Count()
        waiting: Count[tuple[str, str]] = Count()
        nodes: Count[tuple[str, str]] = Count()
        goodputs: dict[str, list[float]] = {}
        for body in self._bodies():
            try:
                found = _DECODER.decode(body)
            except msgspec.ValidationError:  # stored by another version of the CRD; the reconcile says so in status
                found = _Resource({})
            namespace, status = str(found.metadata.get("namespace", "")), found.status
            phases[namespace, status.phase if status.phase in PHASES else PENDING] += 1
            if status.phase in ("Running", "Pending", "Restarting"):
                for state in ("desired", "ready"):
                    nodes[namespace, state] += status.nodes.get(state, 0)
                if status.goodput is not None:
                    goodputs.setdefault(namespace, []).append(_share(status.goodput))
                for condition in status.conditions:
                    kind, reason = condition.get("type"), condition.get("reason")
                    if kind == c.SCHEDULED and condition.get("status") == "False":
                        waiting[namespace, reason if reason in c.SCHEDULED_REASONS else OTHER] += 1
                    if kind == c.ACCEPTED and condition.get("status") != "True":
                        waiting[namespace, NOT_ACCEPTED] += 1
        for name, text, label, counts in (
            ("jobs", "Resources by phase.", "phase", phases),
            (
                "waiting_jobs",
                f"Jobs without all of their pods, by the reason of the condition Scheduled; {NOT_ACCEPTED}: Accepted "
                "is not True.",
                "reason",
                waiting,
            ),
            ("nodes", "Pods of jobs that are not over: desired, and ready.", "state", nodes),
        ):
            family = GaugeMetricFamily(f"ddp_operator_{name}", text, labels=("namespace", label))
            for labels, count in sorted(counts.items()):
                family.add_metric(labels, count)
            yield family
        family = GaugeMetricFamily(
            "ddp_operator_goodput_ratio",
            "Goodput (metrics.md) of jobs that are not over and have made steps: their mean, and the lowest.",
            labels=("namespace", "of"),
        )
        for namespace, shares in sorted(goodputs.items()):
            family.add_metric((namespace, "mean"), sum(shares) / len(shares))
            family.add_metric((namespace, "lowest"), min(shares))
        yield family


def _share(text: str) -> float:
    """Return a goodput; one that another version has written in another form is none."""
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 0.0


class Metrics:
    """The series, and what feeds them."""

    def __init__(self, queue_depth: Callable[[], float], bodies: Callable[[], Iterable[bytes]] = tuple) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(Fleet(bodies))
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.leads = Gauge(
            "ddp_operator_leader", "1 where this operator works, 0 where it stands by.", registry=registry
        )
        self.reconcile_seconds = histogram(
            "ddp_operator_reconcile_duration_seconds", "Duration of one reconcile of one resource.", buckets=SHORT
        )
        self.reconcile_errors = counter(
            "ddp_operator_reconcile_errors_total",
            "Reconciles that failed and will be repeated, by cause: Conflict, Cluster (the API server) or Bug.",
            ["cause"],
        )
        depth = Gauge("ddp_operator_queue_depth", "Resources that wait for a worker.", registry=registry)
        depth.set_function(queue_depth)
        self.api_requests = counter(
            "ddp_operator_api_requests_total",
            "Calls to the API server, watches not counted.",
            ["verb", "resource", "code"],
        )
        self.create_to_job = histogram(
            "ddp_operator_create_to_job_duration_seconds",
            "From the news of a new resource to its first Job; jobs that were there at the operator's start left out.",
            buckets=SHORT,
        )
        self.start_to = histogram(
            "ddp_operator_start_to_stage_duration_seconds",
            "From the start (or resumption) of a first attempt until all ranks have joined, and to its first step.",
            ["stage"],
            buckets=LONG,
        )
        self.restarts = counter(
            "ddp_operator_restarts_total",
            "Restarts by level (process: in the same pods, pod: replaced, group: a new attempt) and category of the "
            "failure; None: no failure, a change of size.",
            ["level", "category"],
        )
        self.failures = counter("ddp_operator_failures_total", "Failures by category, whatever followed.", ["category"])
        self.finished = counter("ddp_operator_finished_jobs_total", "Jobs that have ended, by result.", ["result"])
        self.gpu_seconds = counter(
            "ddp_operator_gpu_seconds_total",
            "GPU-seconds by what GPUs were held for (status.usage): Productive, Waiting (for the first step), or what "
            "they were lost to: a category of failure, Resized, Stalled. Repeated steps are in both of the two. "
            "profile: the name of the jobs' profile, or empty.",
            ["namespace", "profile", "purpose"],
        )
        self.node_failures = counter(
            "ddp_operator_node_failures_total",
            "Failures of jobs with GPUs that were a node's, as reported by pods: it was lost, a GPU error was on it, "
            f"or it was left for its conditions. {OTHER}: of further nodes, beyond {MAX_NODE_LABELS}.",
            ["node"],
        )
        self._node_labels: set[str] = set()
        # Every series that is known beforehand is made, so that its first increase can be seen by ``increase()``.
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

    def on_reconcile(self, seconds: float, error: BaseException | None) -> None:
        """Count one reconcile."""
        self.reconcile_seconds.observe(seconds)
        if error is not None:
            known = "Conflict" if isinstance(error, Conflict) else "Cluster"
            self.reconcile_errors.labels(known if isinstance(error, ClusterError) else "Bug").inc()

    def on_call(self, verb: str, resource: str, code: str) -> None:
        """Count one call to the API server."""
        self.api_requests.labels(verb, resource, code).inc()

    def on_transition(self, namespace: str, transition: Transition) -> None:
        """Count what a pass has found."""
        match transition:
            case Failed(category):
                self.failures.labels(category).inc()
            case Restarted(level, category, count):
                self.restarts.labels(level, category).inc(count)
            case Reached(stage, seconds):
                self.start_to.labels(stage).observe(seconds)
            case Ended(result):
                self.finished.labels(result).inc()
            case NodeFailed(node):
                self.node_failures.labels(self._label_node(node)).inc()
            case Used(purpose, gpu_seconds, profile):
                self.gpu_seconds.labels(namespace, profile, purpose).inc(gpu_seconds)

    def _label_node(self, node: str) -> str:
        """Return a node's label; pods name nodes, so that the number of labels is bounded."""
        if len(self._node_labels) < MAX_NODE_LABELS:
            self._node_labels.add(node)
        return node if node in self._node_labels else OTHER
