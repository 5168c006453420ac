"""Every query of the dashboards, apart from how it is shown.

The labels ``namespace``, ``ddp_job``, ``ddp_attempt`` and ``pod`` come from the scrape, ``rank`` from the trainer. The
series are those of docs/metrics.md, the launcher's are in docs/pod-contract.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """One PromQL expression and how its series are called."""

    expr: str
    legend: str = ""


JOB = "namespace, ddp_job"
RATE = "[$__rate_interval]"


def in_fleet(series: str, more: str = "") -> str:
    """Return a series of all jobs in the chosen namespaces."""
    return f'{series}{{namespace=~"$namespace"{more}}}'


def of_job(series: str, more: str = "") -> str:
    """Return a series of the chosen job."""
    return f'{series}{{namespace=~"$namespace", ddp_job=~"$ddp_job"{more}}}'


def in_phase(phases: str) -> str:
    """Return one series a job that has a pod in one of these phases."""
    return f"max by ({JOB}) ({in_fleet('ddp_launcher_phase', f', phase=~{chr(34)}{phases}{chr(34)}')}) == 1"


def per_second(counter: str, pick: Callable[[str], str]) -> str:
    """Return the rate of a counter of the ranks, a mean of each job's, over the time that is spent in steps.

    Pauses for validation and checkpoints are left out where that time is exported, which it is not of a script whose
    progress comes from its log.
    """
    rate, seconds = f"rate({pick(counter)}{RATE})", f"rate({pick('ddp_step_seconds_sum')}{RATE})"
    return f"(sum by ({JOB}) ({rate}) / on ({JOB}) (sum by ({JOB}) ({seconds}) > 0) or avg by ({JOB}) ({rate} > 0))"


def samples_per_second(pick: Callable[[str], str]) -> str:
    """Return the samples a second of all ranks of each job; where none are counted, what the script's log says."""
    ranks = f"max by ({JOB}) ({pick('ddp_world_size')})"
    said = f"max by ({JOB}) ({pick('ddp_global_samples_per_second')})"
    return f"({ranks} * on ({JOB}) {per_second('ddp_samples_total', pick)} or {said})"


RUNNING = in_phase("Running")
WAITING = in_phase("Starting|WaitingForMaster|Rendezvous")

# ---- fleet

FLEET_RUNNING = Query(f"count({RUNNING}) or vector(0)")
FLEET_WAITING = Query(f"count(({WAITING}) unless on ({JOB}) ({RUNNING})) or vector(0)")
FLEET_RANKS = Query(f"count({in_fleet('ddp_steps_total')}) or vector(0)")
FLEET_GPUS = Query(f"count({in_fleet('ddp_gpu_memory_bytes')}) or vector(0)")
FLEET_SAMPLES = Query(f"sum({samples_per_second(in_fleet)})")
FLEET_PODS_BY_PHASE = Query(f"sum by (phase) ({in_fleet('ddp_launcher_phase')})", "{{phase}}")
FLEET_RATES = Query(samples_per_second(in_fleet), "{{namespace}}/{{ddp_job}}")
FLEET_TIME_IN_STEPS = Query(
    f"avg by ({JOB}) (rate({in_fleet('ddp_step_seconds_sum')}{RATE}))", "{{namespace}}/{{ddp_job}}"
)
# docs/metrics.md: steps that were kept * mean step time / wall time, here of the time that is shown. What was taken
# twice does not count, because the farthest step does not move meanwhile.
_STEPS_KEPT = (
    f"(max by ({JOB}) (max_over_time({in_fleet('ddp_step')}[$__range]))"
    f" - min by ({JOB}) (min_over_time({in_fleet('ddp_step')}[$__range])))"
)
_MEAN_STEP = (
    f"(sum by ({JOB}) (increase({in_fleet('ddp_step_seconds_sum')}[$__range]))"
    f" / sum by ({JOB}) (increase({in_fleet('ddp_step_seconds_count')}[$__range])))"
)
_SEEN_AT = f"timestamp(max by ({JOB}) ({in_fleet('ddp_step')}))[$__range:]"
_GOODPUT = (
    f"clamp_max({_STEPS_KEPT} * on ({JOB}) {_MEAN_STEP}"
    f" / on ({JOB}) (max_over_time({_SEEN_AT}) - min_over_time({_SEEN_AT}) > 0), 1)"
)
FLEET_GOODPUT = Query(f"avg({_GOODPUT})")
FLEET_GOODPUT_BY_JOB = Query(_GOODPUT, "{{namespace}}/{{ddp_job}}")
FLEET_RESTARTS = Query(
    f"sum by ({JOB}) (increase({in_fleet('ddp_launcher_in_place_restarts_total')}[$__range]))"
    f" + on ({JOB}) count by ({JOB}) (count by ({JOB}, ddp_attempt) "
    f"(count_over_time({in_fleet('ddp_launcher_in_place_restarts_total')}[$__range]))) - 1",
    "{{namespace}}/{{ddp_job}}",
)
FLEET_JOBS_BY_PHASE = Query(f"sum by (phase) ({in_fleet('ddp_operator_jobs')})", "{{phase}}")
FLEET_WAITING_WHY = Query(f"sum by (reason) ({in_fleet('ddp_operator_waiting_jobs')})", "{{reason}}")
FLEET_GOODPUT = tuple(
    Query(f"{fold}({in_fleet('ddp_operator_goodput_ratio', f', of={chr(34)}{which}{chr(34)}')})", legend)
    for fold, which, legend in (("avg", "mean", "mean of the namespaces"), ("min", "lowest", "lowest job"))
)
FLEET_FAILURES = Query("sum by (category) (increase(ddp_operator_failures_total[$__range]))", "{{category}}")
FLEET_RESTARTS_BY_RUNG = Query("sum by (rung) (increase(ddp_operator_restarts_total[$__range]))", "{{rung}}")
FLEET_FINISHED = Query("sum by (result) (increase(ddp_operator_finished_jobs_total[$__range]))", "{{result}}")
FLEET_TABLE = (
    Query(f"max by ({JOB}) ({in_fleet('ddp_progress_ratio')})", "done"),
    Query(f"max by ({JOB}) ({in_fleet('ddp_step')})", "step"),
    Query(f"avg by ({JOB}) ({in_fleet('ddp_loss')})", "loss"),
    Query(f"max by ({JOB}) ({in_fleet('ddp_validation_accuracy')})", "validation accuracy"),
    Query(samples_per_second(in_fleet), "samples/s"),
    Query(per_second("ddp_steps_total", in_fleet), "steps/s"),
    Query(f"max by ({JOB}) ({in_fleet('ddp_world_size')})", "ranks"),
    Query(f"time() - max by ({JOB}) ({in_fleet('ddp_last_step_timestamp_seconds')})", "last step ago"),
)

# ---- one job

STEP_SECONDS = f"rate({of_job('ddp_step_seconds_sum')}{RATE})"
STEPS = f"(rate({of_job('ddp_steps_total')}{RATE}) > 0)"
DATA = f"rate({of_job('ddp_data_wait_seconds_total')}{RATE})"
COMPUTE = f"rate({of_job('ddp_compute_seconds_total')}{RATE})"

JOB_PROGRESS = Query(f"max({of_job('ddp_progress_ratio')})")
JOB_STEP_RATE = Query(f"max({per_second('ddp_steps_total', of_job)})", "steps/s")
JOB_TIME_LEFT = Query(f"max({of_job('ddp_total_steps')} - {of_job('ddp_step')}) / {JOB_STEP_RATE.expr}")
JOB_EPOCH = Query(f"max({of_job('ddp_epoch')})", "epoch")
JOB_EPOCHS = Query(f"max({of_job('ddp_epochs')})", "of")
JOB_RANKS = Query(f"max({of_job('ddp_world_size')})")
JOB_RATE = Query(f"max({samples_per_second(of_job)})", "samples/s")
JOB_LAST_STEP = Query(f"time() - max({of_job('ddp_last_step_timestamp_seconds')})")
JOB_LOSS = Query(f"avg({of_job('ddp_loss')})", "mean of all ranks")
JOB_LOSS_MAX = Query(f"max({of_job('ddp_loss')})", "highest rank")
JOB_VALIDATION_LOSS = Query(f"max({of_job('ddp_validation_loss')})", "validation")
JOB_VALIDATION_ACCURACY = Query(f"max({of_job('ddp_validation_accuracy')})", "validation")
JOB_LEARNING_RATE = Query(f"max({of_job('ddp_learning_rate')})", "learning rate")
JOB_GRAD_NORM = Query(f"max({of_job('ddp_grad_norm')})", "before clipping")
JOB_NON_FINITE = Query(f"sum(increase({of_job('ddp_nonfinite_loss_total')}[$__range]))")
# The mean step, taken apart. What is left over data and computation is the wait for other ranks and the update.
JOB_STEP_DATA = Query(f"avg({DATA} / {STEPS})", "data")
JOB_STEP_COMPUTE = Query(f"avg({COMPUTE} / {STEPS})", "forward and backward")
JOB_STEP_WAIT = Query(
    f"clamp_min(avg(({STEP_SECONDS} - {DATA} - {COMPUTE}) / {STEPS}), 0)", "wait for other ranks, update"
)
JOB_STEP_QUANTILES = tuple(
    Query(
        f"histogram_quantile({share}, sum by (le) (rate({of_job('ddp_step_seconds_bucket')}{RATE})))",
        f"{float(share):.0%} are quicker",
    )
    for share in ("0.5", "0.99")
)
JOB_RANK_WORK = Query(f"sum by (rank) (({COMPUTE} + {DATA}) / {STEPS})", "{{rank}}")
# The lower median: the greatest that is not above the median, which of an even number lies between two.
JOB_STRAGGLER = Query(
    f"max({JOB_RANK_WORK.expr}) / max({JOB_RANK_WORK.expr} <= on () group_left () quantile(0.5, {JOB_RANK_WORK.expr}))",
    "slowest rank / median rank",
)
JOB_CHECKPOINT_SECONDS = Query(
    f"sum(increase({of_job('ddp_checkpoint_seconds_sum')}[$__range]))"
    f" / (sum(increase({of_job('ddp_checkpoint_seconds_count')}[$__range])) > 0)",
    "mean time to write one",
)
JOB_CHECKPOINT_LAG = Query(
    f"max({of_job('ddp_step')}) - max({of_job('ddp_checkpoint_step')})", "steps since the newest checkpoint"
)
JOB_PODS_BY_PHASE = Query(f"sum by (phase) ({of_job('ddp_launcher_phase')})", "{{phase}}")
JOB_RESTARTS = Query(f"sum by (pod) ({of_job('ddp_launcher_in_place_restarts_total')})", "{{pod}}")
JOB_GPU_MEMORY = Query(f"max by (rank) ({of_job('ddp_gpu_memory_bytes')})", "rank {{rank}}")
JOB_RESTARTED = Query(f"changes({of_job('ddp_launcher_in_place_restarts_total')}[1m]) > 0")
JOB_ATTEMPTED = Query(
    f"count by (ddp_attempt) ({of_job('ddp_launcher_in_place_restarts_total')})"
    f" unless count by (ddp_attempt) ({of_job('ddp_launcher_in_place_restarts_total')} offset 1m)"
)

# ---- the operator

OPERATORS = Query("count(ddp_operator_queue_depth) or vector(0)")
LEADERS = Query("sum(ddp_operator_leader) or vector(0)")
CREATE_TO_JOB = tuple(
    Query(
        f"histogram_quantile({share}, sum by (le) (rate(ddp_operator_create_to_job_seconds_bucket{RATE})))",
        f"{float(share):.0%} are quicker",
    )
    for share in ("0.5", "0.99")
)
START_TO_STAGE = Query(
    "sum by (stage) (increase(ddp_operator_start_to_stage_seconds_sum[$__range]))"
    " / (sum by (stage) (increase(ddp_operator_start_to_stage_seconds_count[$__range])) > 0)",
    "{{stage}}",
)
QUEUE = Query("sum(ddp_operator_queue_depth)", "waiting")
RECONCILES = Query(f"sum(rate(ddp_operator_reconcile_seconds_count{RATE}))", "reconciles")
RECONCILE_QUANTILES = tuple(
    Query(
        f"histogram_quantile({share}, sum by (le) (rate(ddp_operator_reconcile_seconds_bucket{RATE})))",
        f"{float(share):.0%} are quicker",
    )
    for share in ("0.5", "0.9", "0.99")
)
ERRORS = Query(f"sum by (cause) (rate(ddp_operator_reconcile_errors_total{RATE}))", "{{cause}}")
ERROR_SHARE = Query(
    'sum(increase(ddp_operator_reconcile_errors_total{cause!="Conflict"}[$__range]))'
    " / (sum(increase(ddp_operator_reconcile_seconds_count[$__range])) > 0)"
)
CALLS = Query(f"sum by (verb, resource) (rate(ddp_operator_api_requests_total{RATE}))", "{{verb}} {{resource}}")
ANSWERS = Query(f"sum by (code) (rate(ddp_operator_api_requests_total{RATE}))", "{{code}}")
CALLS_PER_RECONCILE = Query(
    "sum(increase(ddp_operator_api_requests_total[$__range]))"
    " / (sum(increase(ddp_operator_reconcile_seconds_count[$__range])) > 0)"
)
OPERATOR_CPU = Query(
    f"rate(process_cpu_seconds_total{RATE}) and on (instance) ddp_operator_queue_depth", "{{instance}}"
)
OPERATOR_MEMORY = Query("process_resident_memory_bytes and on (instance) ddp_operator_queue_depth", "{{instance}}")
OPERATOR_FILES = Query("process_open_fds and on (instance) ddp_operator_queue_depth", "{{instance}}")
