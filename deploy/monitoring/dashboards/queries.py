"""The queries of the dashboards.

A job may have thousands of ranks, so recording rules in ``../alerts/jobs.yaml`` (``ddp:…``) aggregate over ranks.

The labels ``cluster`` (optional), ``namespace``, ``ddp_job``, ``ddp_attempt`` and ``pod`` come from the scrape, and
``rank`` from the trainer. docs/metrics.md describes the series, docs/pod-contract.md those of the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """A PromQL expression, with the legend of its series."""

    expr: str
    legend: str = ""
    once: bool = False
    """Query only the last value: for expressions over the whole displayed range."""


JOB = "cluster, namespace, ddp_job"
RATE = "[$__rate_interval]"
HOUR = "[1h]"


def in_fleet(series: str, more: str = "") -> str:
    """Return a series of all jobs in the selected clusters and namespaces."""
    return f'{series}{{cluster=~"$cluster", namespace=~"$namespace"{more}}}'


def of_job(series: str, more: str = "") -> str:
    """Return a series of the selected job, identified by cluster, namespace and name."""
    return f'{series}{{cluster="$cluster", namespace="$namespace", ddp_job="$ddp_job"{more}}}'


def of_operator(series: str, more: str = "") -> str:
    """Return a series of the operators of the selected clusters."""
    return f'{series}{{cluster=~"$cluster"{more}}}'


def in_phase(phases: str) -> str:
    """Return one series per job with a pod in one of these phases."""
    return f"max by ({JOB}) ({in_fleet('ddp_launcher_phase', f', phase=~{chr(34)}{phases}{chr(34)}')}) == 1"


def quantiles(buckets: str, *shares: str) -> tuple[Query, ...]:
    """Return a query per quantile of a histogram. ``buckets``: rate of its buckets."""
    return tuple(
        Query(f"histogram_quantile({share}, sum by (le) ({buckets}))", f"{float(share):.0%} are faster")
        for share in shares
    )


RUNNING = in_phase("Running")
WAITING = in_phase("Starting|WaitingForMaster|Rendezvous")

# ---- fleet

ONE_JOB = "{{namespace}}/{{ddp_job}}"

FLEET_RUNNING = Query(f"count({RUNNING}) or vector(0)")
FLEET_WAITING = Query(f"count(({WAITING}) unless on ({JOB}) ({RUNNING})) or vector(0)")
FLEET_RANKS = Query(f"count({in_fleet('ddp_steps_total')}) or vector(0)")
FLEET_GPUS = Query(f"count({in_fleet('ddp_gpu_memory_peak_bytes')}) or vector(0)")
FLEET_PODS_BY_PHASE = Query(f"sum by (phase) ({in_fleet('ddp_launcher_phase')})", "{{phase}}")
FLEET_RATES = Query(in_fleet("ddp:job_samples:rate5m"), ONE_JOB)
FLEET_TIME_IN_STEPS = Query(in_fleet("ddp:job_time_in_steps:ratio5m"), ONE_JOB)
FLEET_GOODPUT_BY_JOB = Query(in_fleet("ddp:job_goodput:ratio1h"), ONE_JOB)
FLEET_RESTARTS = Query(
    f"sum by ({JOB}) (increase({in_fleet('ddp_launcher_in_place_restarts_total')}{HOUR}))"
    f" + on ({JOB}) count by ({JOB}) (count by ({JOB}, ddp_attempt) "
    f"(count_over_time({in_fleet('ddp_launcher_in_place_restarts_total')}{HOUR}))) - 1",
    ONE_JOB,
)
FLEET_JOBS_BY_PHASE = Query(f"sum by (phase) ({in_fleet('ddp_operator_jobs')})", "{{phase}}")
FLEET_WAITING_WHY = Query(f"sum by (reason) ({in_fleet('ddp_operator_waiting_jobs')})", "{{reason}}")
FLEET_GOODPUT = tuple(
    Query(f"{fold}({in_fleet('ddp_operator_goodput_ratio', f', of={chr(34)}{which}{chr(34)}')})", legend)
    for fold, which, legend in (("avg", "mean", "mean of the namespaces"), ("min", "lowest", "lowest job"))
)
FLEET_FAILURES = Query(
    f"sum by (category) (increase({of_operator('ddp_operator_failures_total')}{HOUR}))", "{{category}}"
)
FLEET_RESTARTS_BY_LEVEL = Query(
    f"sum by (level) (increase({of_operator('ddp_operator_restarts_total')}{HOUR}))", "{{level}}"
)
FLEET_FINISHED = Query(
    f"sum by (result) (increase({of_operator('ddp_operator_finished_jobs_total')}{HOUR}))", "{{result}}"
)
FLEET_GPU_HOURS = Query(
    f"sum by (purpose) (increase({in_fleet('ddp_operator_gpu_seconds_total')}{HOUR})) / 3600", "{{purpose}}"
)
FLEET_TABLE = (
    Query(f"max by ({JOB}) ({in_fleet('ddp_progress_ratio')})", "done"),
    Query(f"max by ({JOB}) ({in_fleet('ddp_step')})", "step"),
    Query(f"avg by ({JOB}) ({in_fleet('ddp_loss')})", "loss"),
    Query(f"max by ({JOB}) ({in_fleet('ddp_validation_accuracy_ratio')})", "validation accuracy"),
    Query(in_fleet("ddp:job_samples:rate5m"), "samples/s"),
    Query(in_fleet("ddp:job_steps:rate5m"), "steps/s"),
    Query(f"max by ({JOB}) ({in_fleet('ddp_world_size')})", "ranks"),
    Query(f"time() - max by ({JOB}) ({in_fleet('ddp_last_step_timestamp_seconds')})", "since last step"),
)

# ---- one job

RANK_0 = ', rank="0"'

JOB_PROGRESS = Query(f"max({of_job('ddp_progress_ratio')})")
JOB_STEP_RATE = Query(f"max({of_job('ddp:job_steps:rate5m')})", "steps/s")
JOB_TIME_LEFT = Query(
    f"(max({of_job('ddp_planned_steps')}) - max({of_job('ddp:job_step:max')})) / {JOB_STEP_RATE.expr}"
)
JOB_EPOCH = Query(f"max({of_job('ddp_epoch')})", "epoch")
JOB_EPOCHS = Query(f"max({of_job('ddp_planned_epochs')})", "of")
JOB_RANKS = Query(f"max({of_job('ddp_world_size')})")
JOB_RATE = Query(f"max({of_job('ddp:job_samples:rate5m')})", "samples/s")
JOB_TOKEN_RATE = Query(f"max({of_job('ddp:job_tokens:rate5m')})", "tokens/s")
JOB_LAST_STEP = Query(f"time() - max({of_job('ddp_last_step_timestamp_seconds')})")
JOB_LOSS = Query(f"avg({of_job('ddp_loss')})", "mean of all ranks")
JOB_LOSS_MAX = Query(f"max({of_job('ddp_loss')})", "highest rank")
JOB_VALIDATION_LOSS = Query(f"max({of_job('ddp_validation_loss')})", "validation")
JOB_VALIDATION_ACCURACY = Query(f"max({of_job('ddp_validation_accuracy_ratio')})", "validation")
JOB_LEARNING_RATE = Query(f"max({of_job('ddp_learning_rate')})", "learning rate")
JOB_GRAD_NORM = Query(f"max({of_job('ddp_grad_norm')})", "before clipping")
JOB_NON_FINITE = Query(f"sum(increase({of_job('ddp_nonfinite_losses_total')}[$__range]))", once=True)
# Parts of the mean step. The rest, after data and compute, is the wait for other ranks and the update.
_STEPS = f"(max({of_job('ddp:job_ranks_steps:rate5m')}) > 0)"
_DATA, _COMPUTE, _STEP = (
    f"max({of_job(f'ddp:job_ranks_{part}_seconds:rate5m')})" for part in ("data", "compute", "step")
)
JOB_STEP_DATA = Query(f"{_DATA} / {_STEPS}", "data")
JOB_STEP_COMPUTE = Query(f"{_COMPUTE} / {_STEPS}", "forward and backward")
JOB_STEP_WAIT = Query(f"clamp_min(({_STEP} - {_DATA} - {_COMPUTE}) / {_STEPS}, 0)", "wait for other ranks, update")
JOB_STEP_QUANTILES = quantiles(f"rate({of_job('ddp_step_duration_seconds_bucket', RANK_0)}{RATE})", "0.5", "0.99")
JOB_RANK_WORK = Query(of_job("ddp:rank_work:top32"), "{{rank}}")
JOB_STRAGGLER = Query(f"max({of_job('ddp:job_straggler:ratio')})", "slowest rank / median rank")
JOB_CHECKPOINT_SECONDS = Query(f"max({of_job('ddp:job_checkpoint:seconds1h')})", "mean time per checkpoint")
JOB_CHECKPOINT_LAG = Query(
    f"max({of_job('ddp:job_step:max')}) - max({of_job('ddp_checkpoint_step')})", "steps since the newest checkpoint"
)
JOB_COPY_AGE = Query(
    f"time() - max({of_job('ddp_memory_checkpoint_timestamp_seconds')})", "since the newest copy of any pod"
)
JOB_COPY_STALL = Query(
    f"max(rate({of_job('ddp_memory_checkpoint_stalled_seconds_total')}[5m])"
    f" / (rate({of_job('ddp_memory_checkpoint_saves_total')}[5m]) > 0))",
    "stall per copy, slowest pod",
)
JOB_PODS_BY_PHASE = Query(f"sum by (phase) ({of_job('ddp_launcher_phase')})", "{{phase}}")
JOB_RESTARTS = Query(f"topk(32, sum by (pod) ({of_job('ddp_launcher_in_place_restarts_total')}))", "{{pod}}")
JOB_GPU_MEMORY = Query(of_job("ddp:rank_gpu_memory:top32"), "rank {{rank}}")
JOB_GPU_UTILISATION = Query(of_job("ddp:gpu_utilisation:bottom32"), "{{pod}} GPU {{gpu}}")
JOB_GPU_POWER = Query(of_job("ddp:gpu_power:bottom32"), "{{pod}} GPU {{gpu}}")
JOB_GPU_XID = Query(of_job("ddp:gpu_xid:top32"), "{{pod}} GPU {{gpu}}")
JOB_GPU_MEMORY_SHARE = Query(of_job("ddp:gpu_memory_share:top32"), "{{pod}} GPU {{gpu}}")
JOB_RESTARTED = Query(f"changes({of_job('ddp_launcher_in_place_restarts_total')}[1m]) > 0")
JOB_ATTEMPTED = Query(
    f"count by (ddp_attempt) ({of_job('ddp_launcher_in_place_restarts_total')})"
    f" unless count by (ddp_attempt) ({of_job('ddp_launcher_in_place_restarts_total')} offset 1m)"
)

# ---- the operator

NO_CONFLICT = ', cause!="Conflict"'

OPERATORS = Query(f"count({of_operator('ddp_operator_queue_depth')}) or vector(0)")
LEADERS = Query(f"sum({of_operator('ddp_operator_leader')}) or vector(0)")
CREATE_TO_JOB = quantiles(
    f"rate({of_operator('ddp_operator_create_to_job_duration_seconds_bucket')}{RATE})", "0.5", "0.99"
)
START_TO_STAGE = Query(
    f"sum by (stage) (rate({of_operator('ddp_operator_start_to_stage_duration_seconds_sum')}{HOUR}))"
    f" / (sum by (stage) (rate({of_operator('ddp_operator_start_to_stage_duration_seconds_count')}{HOUR})) > 0)",
    "{{stage}}",
)
QUEUE = Query(f"sum({of_operator('ddp_operator_queue_depth')})", "waiting")
RECONCILES = Query(f"sum(rate({of_operator('ddp_operator_reconcile_duration_seconds_count')}{RATE}))", "reconciles")
RECONCILE_QUANTILES = quantiles(
    f"rate({of_operator('ddp_operator_reconcile_duration_seconds_bucket')}{RATE})", "0.5", "0.9", "0.99"
)
ERRORS = Query(f"sum by (cause) (rate({of_operator('ddp_operator_reconcile_errors_total')}{RATE}))", "{{cause}}")
ERROR_SHARE = Query(
    f"sum(increase({of_operator('ddp_operator_reconcile_errors_total', NO_CONFLICT)}[$__range]))"
    f" / (sum(increase({of_operator('ddp_operator_reconcile_duration_seconds_count')}[$__range])) > 0)",
    once=True,
)
CALLS = Query(
    f"sum by (verb, resource) (rate({of_operator('ddp_operator_api_requests_total')}{RATE}))", "{{verb}} {{resource}}"
)
ANSWERS = Query(f"sum by (code) (rate({of_operator('ddp_operator_api_requests_total')}{RATE}))", "{{code}}")
CALLS_PER_RECONCILE = Query(
    f"sum(increase({of_operator('ddp_operator_api_requests_total')}[$__range]))"
    f" / (sum(increase({of_operator('ddp_operator_reconcile_duration_seconds_count')}[$__range])) > 0)",
    once=True,
)
OPERATOR_CPU = Query(
    f"rate(process_cpu_seconds_total{RATE}) and on (instance) {of_operator('ddp_operator_queue_depth')}", "{{instance}}"
)
OPERATOR_MEMORY = Query(
    f"process_resident_memory_bytes and on (instance) {of_operator('ddp_operator_queue_depth')}", "{{instance}}"
)
OPERATOR_FILES = Query(f"process_open_fds and on (instance) {of_operator('ddp_operator_queue_depth')}", "{{instance}}")
