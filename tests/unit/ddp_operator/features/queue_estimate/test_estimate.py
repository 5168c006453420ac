"""The place in a queue of Kueue, the estimate of the start, and how often and how far it errs in a simulated queue."""

from __future__ import annotations

from datetime import timedelta
from statistics import median
from typing import Any

import pytest

from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Progress, QueueStatus, Status
from ddp_operator.decide.report import format_number
from ddp_operator.features.queue_estimate.cluster_queue import QueueContents, Quotas, parse_workload
from ddp_operator.features.queue_estimate.estimate import QueueView, view_queue
from tests.bench.queue_estimate import measure_world
from tests.bench.queue_world import WorldOptions
from tests.support.builders import NOW

GPU = "nvidia.com/gpu"


def workload(
    uid: str, gpus: int, *, created: float = 0.0, ran: float | None = None, ended: float | None = None, **spec: Any
) -> Any:
    """Return a Workload. ``created``, ``ran``, ``ended``: seconds ago, of its creation, admission and end."""
    times = {"QuotaReserved": ran, "Finished": ended}
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": format_time(NOW - timedelta(seconds=ago))}
        for kind, ago in times.items()
        if ago is not None
    ]
    usage = {"name": "main", "flavors": {GPU: "a100"}, "resourceUsage": {GPU: str(gpus)}}
    admission = {"clusterQueue": "gpu", "podSetAssignments": [usage]}
    pod = {"containers": [{"resources": {"limits": {GPU: "1"}}}]}
    return {
        "metadata": {
            "uid": uid,
            "namespace": "team",
            "creationTimestamp": format_time(NOW - timedelta(seconds=created or ran or 0)),
        },
        "spec": {"queueName": "q", "podSets": [{"count": gpus, "template": {"spec": pod}}], **spec},
        "status": {"conditions": conditions, **({} if ran is None else {"admission": admission})},
    }


def test_requests_of_pod_replace_those_of_its_containers() -> None:
    container = {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "8", GPU: "2"}}}
    sidecar = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}}
    pod = {"containers": [container], "initContainers": [sidecar, {"resources": {"requests": {"cpu": "9"}}}]}
    sizes = []
    for own in ({}, {"resources": {"requests": {"cpu": "4"}, "limits": {"cpu": "6"}}}):
        spec = {"podSets": [{"count": 2, "template": {"spec": {**pod, **own}}}]}
        sizes.append(dict(parse_workload({**workload("a", 1), "spec": spec}).request))
    assert sizes == [{"pods": 2.0, "cpu": 3.0, GPU: 4.0}, {"pods": 2.0, "cpu": 8.0, GPU: 4.0}]


def cluster_queue(gpus: int = 8, *, strategy: str = "BestEffortFIFO", **spec: Any) -> Quotas:
    """Return quotas of one flavor."""
    quota = {"name": GPU, "nominalQuota": str(gpus), **spec.pop("quota", {})}
    group = {"flavors": [{"name": "a100", "resources": [quota]}]}
    return Quotas({"spec": {"queueingStrategy": strategy, "resourceGroups": [group], **spec}})


def training(left: float, *, share: float = 0.5) -> Status:
    """Return the status of a job that has made this share of its steps."""
    step = round(1000 * share)
    rate = format_number((1000 - step) / left)
    return Status(progress=Progress(step=step, total_steps=1000, steps_per_second=rate, eta=format_duration(left)))


HISTORY = [workload(f"old{n}", 8, created=9000, ran=8000 - n, ended=7000) for n in range(6)]
"""Workloads that each ran for 1,000 seconds."""


def view(*items: Any, quotas: Quotas | None = None, **statuses: Status) -> QueueView:
    contents = QueueContents("gpu", [parse_workload(item) for item in (*items, *HISTORY)], statuses, NOW)
    return view_queue(contents, quotas or cluster_queue())


def place(result: QueueView, uid: str, before: QueueStatus | None = None) -> QueueStatus:
    found = result.place(uid, before)
    assert found is not None
    return found


class TestEstimate:
    def test_steps_of_running_job_predict_start(self) -> None:
        """600 s are left by the present rate, and by the mean rate."""
        result = view(workload("run", 8, ran=600), workload("mine", 8), run=training(600)).estimates["mine"]
        assert 570 < result.p50 < 630 < result.p90 < 700

    @pytest.mark.parametrize("left", [1, 60, 999_999_999])
    @pytest.mark.parametrize("total", [900_000_000, 10**15])
    def test_any_number_of_steps_of_running_job_leaves_a_position(self, total: int, left: int) -> None:
        status = Status(
            progress=Progress(
                step=1, total_steps=total, steps_per_second=format_number(total / left), eta=format_duration(left)
            )
        )
        quotas = cluster_queue(strategy="StrictFIFO")
        result = view(workload("run", 8, ran=700_000), workload("mine", 8), run=status, quotas=quotas)
        placed = place(result, "mine")
        assert placed.position == 1
        assert placed.start_p90 is None or placed.start_p90 < NOW + timedelta(days=366)

    def test_different_rates_widen_estimate(self) -> None:
        slow = view(workload("run", 8, ran=1500), workload("mine", 8), run=training(600)).estimates["mine"]
        assert slow.p90 > 800

    def test_time_after_last_step_is_that_of_ended_jobs(self) -> None:
        saved = Status(progress=Progress(last_step_time=NOW - timedelta(seconds=7200)))
        statuses = {f"old{n}": saved for n in range(6)}  # their quota became free 200 s later
        result = view(workload("run", 8, ran=600), workload("mine", 8), run=training(600), **statuses)
        assert 770 < result.estimates["mine"].p50 < 830

    def test_delay_of_admissions_is_that_of_former_ones(self) -> None:
        """HISTORY ended 7,000 s ago; the running job had waited for it and was admitted 90 s later."""
        running = workload("run", 8, created=8000, ran=6910)
        result = view(running, workload("mine", 8), run=training(600, share=0.92)).estimates["mine"]
        assert 660 < result.p50 < 720

    def test_each_one_ahead_adds_length_of_history(self) -> None:
        ahead = [workload(f"ahead{n}", 8, created=100 - n) for n in range(3)]
        result = view(workload("run", 8, ran=600), *ahead, workload("mine", 8), run=training(600)).estimates
        assert 3500 < result["mine"].p50 < 3800
        assert list(result) == ["ahead0", "ahead1", "ahead2", "mine"]

    def test_time_limit_bounds_length(self) -> None:
        ahead = workload("ahead", 8, created=50, maximumExecutionTimeSeconds=100)
        result = view(workload("run", 8, ran=600), ahead, workload("mine", 8), run=training(600)).estimates
        assert 60 < result["mine"].p50 - result["ahead"].p50 <= 100

    def test_strict_queue_holds_small_one_behind_large_one(self) -> None:
        items = workload("run", 6, ran=600), workload("large", 4, created=50), workload("small", 1)
        best = view(*items, run=training(600)).estimates["small"]
        strict = view(*items, run=training(600), quotas=cluster_queue(strategy="StrictFIFO")).estimates["small"]
        assert best.p50 == 0.0
        assert strict.p50 > 500

    @pytest.mark.parametrize("strategy", ["BestEffortFIFO", "StrictFIFO"])
    def test_one_that_never_fits_blocks_strict_queue_only(self, strategy: str) -> None:
        items = workload("run", 8, ran=600), workload("huge", 9, created=50), workload("mine", 8)
        result = view(*items, run=training(600), quotas=cluster_queue(strategy=strategy))
        assert "huge" not in result.estimates
        assert ("mine" in result.estimates) == (strategy == "BestEffortFIFO")
        assert result.exceeds_quota("huge") == (
            f"insufficient quota in ClusterQueue gpu, request > maximum capacity ({GPU}: 9 > 8)"
        )
        assert result.exceeds_quota("mine") == ""

    def test_no_estimate_unless_most_running_jobs_report_steps(self) -> None:
        runs = [workload(f"run{n}", 2, ran=600) for n in range(4)]
        known = {f"run{n}": training(600) for n in range(4)}
        assert "mine" in view(*runs, workload("mine", 8), **known).estimates
        assert "mine" not in view(*runs, workload("mine", 8), **dict(list(known.items())[:3])).estimates

    def test_cohort_permits_borrowing_and_has_no_estimate(self) -> None:
        items = workload("run", 8, ran=600), workload("mine", 9)
        shared = view(*items, run=training(600), quotas=cluster_queue(cohortName="all"))
        assert (shared.estimates, shared.exceeds_quota("mine")) == ({}, "")
        limited = cluster_queue(cohort="all", quota={"borrowingLimit": "0"})
        assert view(*items, quotas=limited).exceeds_quota("mine")

    def test_long_queue_is_bounded(self) -> None:
        many = [workload(f"w{n:04}", 1, created=5000 - n) for n in range(3000)]
        result = view(workload("run", 8, ran=600), *many, run=training(600))
        assert "w0000" in result.estimates
        assert "w2999" not in result.estimates
        assert place(result, "w2999").position == 3000

    @pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.nightly)])
    def test_errors_in_simulated_queue(self, strict: bool) -> None:
        """A part of the measurement of tests.bench.queue_estimate, in which jobs fail and rates drift."""
        outcomes = []
        for seed in (10, 11):
            first, half, _ = measure_world(WorldOptions(seed=seed, strict=strict, every=18))
            outcomes += [*first, *half]
        covered = sum(outcome.left <= outcome.p90 for outcome in outcomes)
        assert len(outcomes) >= 12
        assert covered / len(outcomes) >= 0.75
        assert median(abs(outcome.p50 - outcome.left) / outcome.wait for outcome in outcomes) <= 0.2


class TestPlace:
    def test_order_is_priority_then_age(self) -> None:
        items = workload("old", 8, created=90), workload("new", 8, created=10), workload("high", 8, priority=5)
        evicted = workload("evicted", 8, created=99)
        moved = {
            "type": "Evicted",
            "status": "True",
            "reason": "PodsReadyTimeout",
            "lastTransitionTime": format_time(NOW),
        }
        evicted["status"]["conditions"].append(moved)
        result = view(workload("run", 5, ran=60), *items, evicted, workload("off", 8, active=False))
        places = {name: place(result, name).position for name in ("high", "old", "new", "evicted")}
        assert list(places.values()) == [1, 2, 3, 4]
        assert place(result, "old").of == 4
        assert place(result, "old").waits_for == f"{GPU}: 8 > 3"
        assert result.place("run", None) is None

    def test_small_change_keeps_place(self) -> None:
        items = workload("run", 8, ran=600), workload("mine", 8)
        before = place(view(*items, run=training(1200)), "mine")
        assert before.start_p50 is not None
        assert place(view(*items, run=training(1220)), "mine", before) is before
        later = place(view(*items, run=training(1700)), "mine", before)
        assert later.start_p50 is not None
        assert later.start_p50 > before.start_p50
        assert place(view(*items, workload("ahead", 8, created=9), run=training(1200)), "mine", before).position == 2
        assert place(view(*items), "mine", before).start_p50 is None
