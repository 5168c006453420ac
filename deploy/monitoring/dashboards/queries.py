"""Every query of the dashboards, apart from how it is shown.

The labels ``cluster`` (where there is one), ``namespace``, ``ddp_job``, ``ddp_attempt`` and ``pod`` come from the
scrape, ``rank`` from the trainer. The series are those of docs/metrics.md, the launcher's are in docs/pod-contract.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """One PromQL expression and how its series are called."""

    expr: str
    legend: str = ""


JOB = "cluster, namespace, ddp_job"
RATE = "[$__rate_interval]"
HOUR = "[1h]"


def in_fleet(series: str, more: str = "") -> str:
    """Return a series of all jobs in the chosen clusters and namespaces."""
    return f'{series}{{cluster=~"$cluster", namespace=~"$namespace"{more}}}'


def of_job(series: str, more: str = "") -> str:
    """Return a series of the chosen job: of one namespace of one cluster, so that namesakes stay apart."""
    return f'{series}{{cluster="$cluster", namespace="$namespace", ddp_job="$ddp_job"{more}}}'


def of_operator(series: str, more: str = "") -> str:
    """Return a series of the operators of the chosen clusters."""
    return f'{series}{{cluster=~"$cluster"{more}}}'


def of_gpus(series: str) -> str:
    """Return a series of NVIDIA's dcgm-exporter for the GPUs of the chosen job's pods."""
    mine = f"max by (cluster, namespace, pod) ({of_job('ddp_launcher_phase')})"
    return f'({series}{{cluster="$cluster", namespace="$namespace"}} and on (cluster, namespace, pod) {mine})'


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


def quantiles(buckets: str, *shares: str) -> tuple[Query, ...]:
    """Return a line for each of these shares of a histogram."""
    return tuple(
        Query(f"histogram_quantile({share}, sum by (le) (rate({buckets}{RATE})))", f"{float(share):.0%} are quicker")
        for share in shares
    )


RUNNING = in_phase("Running")
WAITING = in_phase("Starting|WaitingForMaster|Rendezvous")

# ---- fleet

ONE_JOB = "{{namespace}}/{{ddp_job}}"

FLEET_RUNNING = Query(f"count({RUNNING}) or vector(0)")
FLEET_WAITING = Query(f"count(({WAITING}) unless on ({JOB}) ({RUNNING})) or vector(0)")
FLEET_RANKS = Query(f"count({in_fleet('ddp_steps_total')}) or vector(0)")
FLEET_GPUS = Query(f"count({in_fleet('ddp_gpu_memory_bytes')}) or vector(0)")
FLEET_PODS_BY_PHASE = Query(f"sum by (phase) ({in_fleet('ddp_launcher_phase')})", "{{phase}}")
FLEET_RATES = Query(samples_per_second(in_fleet), ONE_JOB)
FLEET_TIME_IN_STEPS = Query(f"avg by ({JOB}) (rate({in_fleet('ddp_step_seconds_sum')}{RATE}))", ONE_JOB)
# docs/metrics.md: steps that were kept * mean step time / wall time, here of the last hour. What was taken
# twice does not count, because the farthest step does not move meanwhile.
_STEPS_KEPT = (
    f"(max by ({JOB}) (max_over_time({in_fleet('ddp_step')}{HOUR}))"
    f" - min by ({JOB}) (min_over_time({in_fleet('ddp_step')}{HOUR})))"
)
_MEAN_STEP = (
    f"(sum by ({JOB}) (increase({in_fleet('ddp_step_seconds_sum')}{HOUR}))"
    f" / sum by ({JOB}) (increase({in_fleet('ddp_step_seconds_count')}{HOUR})))"
)
_SEEN_AT = f"timestamp(max by ({JOB}) ({in_fleet('ddp_step')}))[1h:]"
_GOODPUT = (
    f"clamp_max({_STEPS_KEPT} * on ({JOB}) {_MEAN_STEP}"
    f" / on ({JOB}) (max_over_time({_SEEN_AT}) - min_over_time({_SEEN_AT}) > 0), 1)"
)
FLEET_GOODPUT_BY_JOB = Query(_GOODPUT, ONE_JOB)
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
JOB_STEP_QUANTILES = quantiles(of_job("ddp_step_seconds_bucket"), "0.5", "0.99")
JOB_RANK_WORK = Query(f"sum by (rank) (({COMPUTE} + {DATA}) / {STEPS})", "{{rank}}")
# The lower median: the greatest that is not above the median, which of an even number lies between two.
JOB_STRAGGLER = Query(
    f"max({JOB_RANK_WORK.expr}) / max({JOB_RANK_WORK.expr} <= on () group_left () quantile(0.5, {JOB_RANK_WORK.expr}))",
    "slowest rank / median rank",
)
JOB_CHECKPOINT_SECONDS = Query(
    f"sum(rate({of_job('ddp_checkpoint_seconds_sum')}{HOUR}))"
    f" / (sum(rate({of_job('ddp_checkpoint_seconds_count')}{HOUR})) > 0)",
    "mean time to write one",
)
JOB_CHECKPOINT_LAG = Query(
    f"max({of_job('ddp_step')}) - max({of_job('ddp_checkpoint_step')})", "steps since the newest checkpoint"
)
JOB_PODS_BY_PHASE = Query(f"sum by (phase) ({of_job('ddp_launcher_phase')})", "{{phase}}")
JOB_RESTARTS = Query(f"sum by (pod) ({of_job('ddp_launcher_in_place_restarts_total')})", "{{pod}}")
JOB_GPU_MEMORY = Query(f"max by (rank) ({of_job('ddp_gpu_memory_bytes')})", "rank {{rank}}")
JOB_GPU_UTILISATION = Query(of_gpus("DCGM_FI_DEV_GPU_UTIL"), "{{pod}} GPU {{gpu}}")
JOB_GPU_POWER = Query(of_gpus("DCGM_FI_DEV_POWER_USAGE"), "{{pod}} GPU {{gpu}}")
JOB_GPU_XID = Query(of_gpus("DCGM_FI_DEV_XID_ERRORS"), "{{pod}} GPU {{gpu}}")
JOB_GPU_MEMORY_SHARE = Query(
    f"{of_gpus('DCGM_FI_DEV_FB_USED')} / ({of_gpus('DCGM_FI_DEV_FB_USED')} + {of_gpus('DCGM_FI_DEV_FB_FREE')})",
    "{{pod}} GPU {{gpu}}",
)
JOB_RESTARTED = Query(f"changes({of_job('ddp_launcher_in_place_restarts_total')}[1m]) > 0")
JOB_ATTEMPTED = Query(
    f"count by (ddp_attempt) ({of_job('ddp_launcher_in_place_restarts_total')})"
    f" unless count by (ddp_attempt) ({of_job('ddp_launcher_in_place_restarts_total')} offset 1m)"
)

# ---- the operator

NO_CONFLICT = ', cause!="Conflict"'

OPERATORS = Query(f"count({of_operator('ddp_operator_queue_depth')}) or vector(0)")
LEADERS = Query(f"sum({of_operator('ddp_operator_leader')}) or vector(0)")
CREATE_TO_JOB = quantiles(of_operator("ddp_operator_create_to_job_seconds_bucket"), "0.5", "0.99")
START_TO_STAGE = Query(
    f"sum by (stage) (rate({of_operator('ddp_operator_start_to_stage_seconds_sum')}{HOUR}))"
    f" / (sum by (stage) (rate({of_operator('ddp_operator_start_to_stage_seconds_count')}{HOUR})) > 0)",
    "{{stage}}",
)
QUEUE = Query(f"sum({of_operator('ddp_operator_queue_depth')})", "waiting")
RECONCILES = Query(f"sum(rate({of_operator('ddp_operator_reconcile_seconds_count')}{RATE}))", "reconciles")
RECONCILE_QUANTILES = quantiles(of_operator("ddp_operator_reconcile_seconds_bucket"), "0.5", "0.9", "0.99")
ERRORS = Query(f"sum by (cause) (rate({of_operator('ddp_operator_reconcile_errors_total')}{RATE}))", "{{cause}}")
ERROR_SHARE = Query(
    f"sum(increase({of_operator('ddp_operator_reconcile_errors_total', NO_CONFLICT)}[$__range]))"
    f" / (sum(increase({of_operator('ddp_operator_reconcile_seconds_count')}[$__range])) > 0)"
)
CALLS = Query(
    f"sum by (verb, resource) (rate({of_operator('ddp_operator_api_requests_total')}{RATE}))", "{{verb}} {{resource}}"
)
ANSWERS = Query(f"sum by (code) (rate({of_operator('ddp_operator_api_requests_total')}{RATE}))", "{{code}}")
CALLS_PER_RECONCILE = Query(
    f"sum(increase({of_operator('ddp_operator_api_requests_total')}[$__range]))"
    f" / (sum(increase({of_operator('ddp_operator_reconcile_seconds_count')}[$__range])) > 0)"
)
OPERATOR_CPU = Query(
    f"rate(process_cpu_seconds_total{RATE}) and on (instance) {of_operator('ddp_operator_queue_depth')}", "{{instance}}"
)
OPERATOR_MEMORY = Query(
    f"process_resident_memory_bytes and on (instance) {of_operator('ddp_operator_queue_depth')}", "{{instance}}"
)
OPERATOR_FILES = Query(f"process_open_fds and on (instance) {of_operator('ddp_operator_queue_depth')}", "{{instance}}")
