"""Measure the estimate of the start in a simulated queue: how many starts P90 covers, and the error of P50."""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.status import Progress, Status
from ddp_operator.decide.report import format_number
from ddp_operator.features.queue_estimate.cluster_queue import QueueContents, QueuedWorkload, Quotas
from ddp_operator.features.queue_estimate.estimate import view_queue
from tests.bench.queue_world import SimulatedJob, WorldOptions, build_jobs, run_queue

START = datetime(2026, 11, 1, tzinfo=UTC)
GPU = "nvidia.com/gpu"
STEPS = 100_000


class Outcome(NamedTuple):
    """An estimate of a job that waited: seconds from the estimate until it started, P50 and P90."""

    wait: float
    left: float
    p50: float
    p90: float


def observe_workload(job: SimulatedJob, now: float) -> QueuedWorkload:
    """Return a job's Workload at a time of the world."""
    is_admitted = job.admitted <= now
    return QueuedWorkload(
        uid=f"{job.number:06}",
        local_queue=("team", "q"),
        job_name=str(job.number),
        priority=0,
        created=START + timedelta(seconds=job.created),
        request={GPU: float(job.gpus)},
        usage=((("gpus", GPU), float(job.gpus)),) if is_admitted else (),
        cluster_queue="gpu" if is_admitted else "",
        admitted=START + timedelta(seconds=job.admitted) if is_admitted else None,
        finished=START + timedelta(seconds=job.ended) if job.ended <= now else None,
        seconds_limit=math.inf,
        active=True,
    )


def observe_progress(job: SimulatedJob, elapsed: float, admitted: datetime, speed: float = 1.0) -> Progress | None:
    """Return the last progress of an admitted job; None: it reports no step. ``elapsed``: seconds of the world."""
    stepping = min(elapsed, job.last_step)
    share = job.share(stepping)
    rate = job.rate(stepping)
    if not job.reports or share <= 0 or rate <= 0:
        return None
    return Progress(
        step=max(1, round(share * STEPS)),
        total_steps=STEPS,
        eta=format_duration((1 - share) / rate / speed),
        steps_per_second=format_number(STEPS * rate * speed),
        last_step_time=admitted + timedelta(seconds=stepping / speed),
    )


def estimate_at(jobs: Sequence[SimulatedJob], target: SimulatedJob, now: float, quotas: Quotas) -> Outcome | None:
    """Return the estimate for a job at a time of the world; None: there is no basis for one."""
    known = [job for job in jobs if job.created <= now]
    training = {}
    for job in known:
        if job.admitted <= now:
            progress = observe_progress(job, now - job.admitted, START + timedelta(seconds=job.admitted))
            training[f"{job.number:06}"] = Status(progress=progress)
    workloads = [observe_workload(job, now) for job in known]
    contents = QueueContents("gpu", workloads, training, START + timedelta(seconds=now))
    estimate = view_queue(contents, quotas).estimates.get(f"{target.number:06}")
    if estimate is None:
        return None
    return Outcome(target.admitted - target.created, target.admitted - now, estimate.p50, estimate.p90)


def measure_world(options: WorldOptions) -> tuple[list[Outcome], list[Outcome], int]:
    """Return the estimates at creation and at half of the wait, and the number of jobs that waited."""
    jobs = build_jobs(options)
    run_queue(jobs, options.gpus, strict=options.strict)
    flavor = {"name": "gpus", "resources": [{"name": GPU, "nominalQuota": str(options.gpus)}]}
    strategy = "StrictFIFO" if options.strict else "BestEffortFIFO"
    quotas = Quotas({"spec": {"queueingStrategy": strategy, "resourceGroups": [{"flavors": [flavor]}]}})
    early = []
    late = []
    waited = [job for job in jobs[: options.jobs] if job.admitted - job.created >= 60]
    for job in waited[:: options.every]:
        first = estimate_at(jobs, job, job.created, quotas)
        second = estimate_at(jobs, job, (job.created + job.admitted) / 2, quotas)
        early += [first] if first else []
        late += [second] if second else []
    return early, late, len(waited)


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Return coverage and error in one line."""
    if not outcomes:
        return "none"
    covered = sum(item.left <= item.p90 for item in outcomes) / len(outcomes)
    below = sum(item.left <= item.p50 for item in outcomes) / len(outcomes)
    error = statistics.median(abs(item.p50 - item.left) / item.wait for item in outcomes)
    of_left = statistics.median(abs(item.p50 - item.left) / item.left for item in outcomes)
    return f"n={len(outcomes):3} P90 {covered:.0%} P50 {below:.0%} err/wait {error:.1%} err/left {of_left:.1%}"


if __name__ == "__main__":
    for name, base in {
        "default": WorldOptions(),
        "strict": WorldOptions(strict=True),
        "half report": WorldOptions(reporting=0.5),
        "3/4 report": WorldOptions(reporting=0.8),
        "sigma .6": WorldOptions(sigma=0.6),
        "load 1.3": WorldOptions(load=1.3),
        "load .8": WorldOptions(load=0.8),
    }.items():
        if len(sys.argv) > 3 and name not in sys.argv[3:]:
            continue
        early, late, waited = [], [], 0
        began = time.perf_counter()
        base = replace(base, every=6)
        for seed in range(int(sys.argv[1]), int(sys.argv[2])):
            first, second, count = measure_world(replace(base, seed=seed))
            early += first
            late += second
            waited += count
        seconds = time.perf_counter() - began
        print(
            f"{name:12} waited {waited} {seconds:.0f}s\n   early {summarize(early)}\n   late  {summarize(late)}",
            flush=True,
        )
