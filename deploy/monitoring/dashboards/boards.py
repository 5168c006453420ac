"""The three dashboards. Their uids are stable, because links and alerts refer to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as board

from . import queries as q
from .panels import GREEN, ORANGE, RED, SOURCE, lay_out, show_course, show_number, show_rows, show_table

GOODPUT = ((0, RED), (0.5, ORANGE), (0.8, GREEN))
NONE_IS_BAD = ((0, RED), (1, GREEN))
LAST_STEP = ((0, GREEN), (120, ORANGE), (600, RED))
ANY_IS_BAD = ((0, GREEN), (1, RED))


def build_fleet() -> dashboard.Dashboard:
    """Build the dashboard of all jobs of the selected clusters and namespaces."""
    of_series = _link_to_job("__field.labels")
    return lay_out(
        _start("ddp-fleet", "DDP: fleet", "All training jobs of the selected namespaces.")
        .with_variable(_many("cluster", "Cluster", "label_values(ddp_launcher_phase, cluster)"))
        .with_variable(
            _many("namespace", "Namespace", 'label_values(ddp_launcher_phase{cluster=~"$cluster"}, namespace)')
        ),
        [
            ("Now", 5, [
                show_number("Jobs training", q.FLEET_RUNNING, about="Jobs with a pod whose workers run."),
                show_number("Jobs waiting", q.FLEET_WAITING, about="Jobs whose pods wait for their peers."),
                show_number("Ranks", q.FLEET_RANKS, about="Worker processes."),
                show_number("GPUs in use", q.FLEET_GPUS, about="Ranks that use device memory, one GPU each."),
                show_number(
                    "Goodput", q.FLEET_GOODPUT, unit="percentunit", steps=GOODPUT,
                    about="Share of the time with productive steps, since the start of each job (docs/metrics.md).",
                ),
            ]),
            ("Jobs", 10, [
                show_table(
                    "Jobs", q.FLEET_TABLE, about="One row per job; its name links to its dashboard.",
                    links={"ddp_job": _link_to_job("__data.fields")},
                    units={"done": "percentunit", "validation accuracy": "percentunit", "since last step": "s"},
                ),
            ]),
            ("Over time", 8, [
                show_course(
                    "Samples per second", q.FLEET_RATES, link=of_series, about="Sum over the ranks of a job."
                ),
                show_course("Pods by phase", q.FLEET_PODS_BY_PHASE, stacked=True, about="As the launchers report."),
            ]),
            ("Reported by the operator", 8, [
                show_course("Jobs by phase", q.FLEET_JOBS_BY_PHASE, stacked=True, about="Including jobs without pods."),
                show_course(
                    "Jobs with missing pods", q.FLEET_WAITING_WHY, stacked=True,
                    about="By the reason of the condition Scheduled: Unschedulable, ImagePull and others.",
                ),
                show_course(
                    "Failures by category", q.FLEET_FAILURES, stacked=True,
                    about="Within one hour, in all namespaces.",
                ),
                show_course(
                    "Restarts by level", q.FLEET_RESTARTS_BY_LEVEL, stacked=True,
                    about="Within one hour. process: in the same pods; pod: a replaced pod; group: a new attempt.",
                ),
                show_course("Ended jobs", q.FLEET_FINISHED, stacked=True, about="Within one hour."),
            ]),
            ("Losses", 8, [
                show_course(
                    "Goodput", q.FLEET_GOODPUT_BY_JOB, unit="percentunit", highest=1, link=of_series,
                    about="Share of the last hour in productive steps; repeated steps count as lost.",
                ),
                show_course(
                    "Goodput since the start", q.FLEET_GOODPUT, unit="percentunit", highest=1,
                    about="status.goodput of unfinished jobs; includes start-up and waiting.",
                ),
                show_course(
                    "GPU hours by purpose", q.FLEET_GPU_HOURS, stacked=True,
                    about="Within one hour, by the categories of status.usage: productive, waiting, lost by cause.",
                ),
                show_course(
                    "Share of time in steps", q.FLEET_TIME_IN_STEPS, unit="percentunit", highest=1, link=of_series,
                    about="The rest is start-up, waiting for pods, validation and checkpoints.",
                ),
                show_course(
                    "Restarts", q.FLEET_RESTARTS, link=of_series,
                    about="Restarts in the same pods and with new pods, within one hour.",
                ),
            ]),
        ],
    )  # fmt: skip


def build_job() -> dashboard.Dashboard:
    """Build the dashboard of one job."""
    builder = _start("ddp-job", "DDP: job", "One training job: its progress, speed and obstacles.")
    logs = dashboard.DatasourceVariable("logs").label("Pod logs").type("loki")
    here = 'cluster="$cluster", namespace="$namespace"'
    for variable in (
        _one("cluster", "Cluster", "label_values(ddp_launcher_phase, cluster)"),
        _one("namespace", "Namespace", 'label_values(ddp_launcher_phase{cluster="$cluster"}, namespace)'),
        _one("ddp_job", "Job", f"label_values(ddp_launcher_phase{{{here}}}, ddp_job)"),
        logs,
    ):
        builder = builder.with_variable(variable)
    to_logs = _link_to_logs()
    builder = builder.annotation(_mark("Restart in the same pods", q.JOB_RESTARTED, "orange"))
    builder = builder.annotation(_mark("New attempt", q.JOB_ATTEMPTED, "red"))
    return lay_out(
        builder,
        [
            ("Progress", 5, [
                show_number("Done", q.JOB_PROGRESS, unit="percentunit", decimals=1, about="Completed share of steps."),
                show_number("Time left", q.JOB_TIME_LEFT, unit="s", decimals=0, about="At the current rate."),
                show_number("Epoch", [q.JOB_EPOCH, q.JOB_EPOCHS], about="Current epoch, from 1, and their number."),
                show_number("Ranks", q.JOB_RANKS, about="The world size."),
                show_number("Samples per second", q.JOB_RATE, decimals=0, about="Sum over all ranks."),
                show_number("Since last step", q.JOB_LAST_STEP, unit="s", decimals=0, steps=LAST_STEP, about="Any."),
                show_number("Non-finite losses", q.JOB_NON_FINITE, steps=ANY_IS_BAD, about="NaN or infinity."),
            ]),
            ("Learning", 9, [
                show_course(
                    "Loss", [q.JOB_LOSS, q.JOB_LOSS_MAX, q.JOB_VALIDATION_LOSS], unit="none",
                    about="Training: mean of each rank's batches since its previous log line.",
                ),
                show_course(
                    "Validation accuracy", q.JOB_VALIDATION_ACCURACY, unit="percentunit", highest=1,
                    about="Over all ranks; each sample counts once.",
                ),
                show_course("Learning rate", q.JOB_LEARNING_RATE, unit="sci", decimals=2, about="Of the last step."),
                show_course("Gradient norm", q.JOB_GRAD_NORM, about="Before clipping; only with clip_norm."),
            ]),
            ("Speed", 9, [
                show_course("Samples per second", q.JOB_RATE, about="Sum over all ranks."),
                show_course("Tokens per second", q.JOB_TOKEN_RATE, about="Sum over all ranks, for language models."),
                show_course("Steps per second", q.JOB_STEP_RATE, about="Also for scripts that do not count samples."),
                show_course(
                    "Mean step", [q.JOB_STEP_DATA, q.JOB_STEP_COMPUTE, q.JOB_STEP_WAIT], unit="s", stacked=True,
                    about="Parts of a step. Much data: a slow loader. Much wait: a slow rank or network.",
                ),
                show_course("Step time", q.JOB_STEP_QUANTILES, unit="s", about="Of rank 0, with the wait for peers."),
            ]),
            ("Stragglers", 9, [
                show_rows(
                    "Own work per step, by rank", q.JOB_RANK_WORK, unit="s",
                    about="Data and compute, without the wait for peers; the 32 slowest. An outlier slows all ranks.",
                ),
                show_course("Slowest rank", q.JOB_STRAGGLER, about="Own work relative to the median rank."),
                show_course(
                    "GPU memory", q.JOB_GPU_MEMORY, unit="bytes",
                    about="Peak memory of a rank's tensors; the 32 highest.",
                ),
            ]),
            ("GPUs (needs dcgm-exporter)", 8, [
                show_course(
                    "GPU utilisation", q.JOB_GPU_UTILISATION, unit="percent", highest=100, link=to_logs,
                    about="Share of the time with a running kernel; the 32 lowest.",
                ),
                show_course("GPU power", q.JOB_GPU_POWER, unit="watt", link=to_logs, about="Current; the 32 lowest."),
                show_course(
                    "GPU memory in use", q.JOB_GPU_MEMORY_SHARE, unit="percentunit", highest=1, link=to_logs,
                    about="Share of the capacity, including PyTorch's cache and other processes; the 32 highest.",
                ),
                show_course(
                    "XID errors", q.JOB_GPU_XID, link=to_logs,
                    about="Last driver error of GPUs with errors, by its number in NVIDIA's XID catalogue.",
                ),
            ]),
            ("Safety", 8, [
                show_course(
                    "Steps at risk", q.JOB_CHECKPOINT_LAG, about="Steps that a failure would lose now."
                ),
                show_course(
                    "Checkpoint time", q.JOB_CHECKPOINT_SECONDS, unit="s", about="From the snapshot to the rename."
                ),
                show_course(
                    "Age of the copy in memory", q.JOB_COPY_AGE, unit="s",
                    about="A lost rank or pod costs the steps since then (docs/checkpoints.md).",
                ),
                show_course(
                    "Stall per copy in memory", q.JOB_COPY_STALL, unit="s",
                    about="Time for which a copy stops training.",
                ),
                show_course("Pods by phase", q.JOB_PODS_BY_PHASE, stacked=True, about="As the launchers report."),
                show_course(
                    "Restarts in the same pods", q.JOB_RESTARTS, link=to_logs,
                    about="Of running pods; the 32 highest.",
                ),
            ]),
        ],
    )  # fmt: skip


def build_operator() -> dashboard.Dashboard:
    """Build the dashboard of the operator."""
    return lay_out(
        _start("ddp-operator", "DDP: operator", "Health of the operator, and its calls to the API server.")
        .with_variable(_many("cluster", "Cluster", "label_values(ddp_operator_queue_depth, cluster)")),
        [
            ("Now", 5, [
                show_number("Operators", q.OPERATORS, steps=NONE_IS_BAD, about="0: jobs continue, none starts."),
                show_number("Leaders", q.LEADERS, steps=NONE_IS_BAD, about="0: jobs continue, none starts."),
                show_number("Queue", q.QUEUE, steps=((100, RED),), about="Resources that wait for a worker."),
                show_number("Failed reconciles", q.ERROR_SHARE, unit="percentunit", steps=((0, GREEN), (0.1, RED)),
                            about="Without write conflicts."),
                show_number("Calls per reconcile", q.CALLS_PER_RECONCILE, decimals=1, about="To the API server."),
            ]),
            ("Work", 9, [
                show_course("Reconciles", q.RECONCILES, unit="ops", about="Per second."),
                show_course("Reconcile time", q.RECONCILE_QUANTILES, unit="s", about="Including calls."),
                show_course("Errors by cause", q.ERRORS, unit="ops", about="Conflict: of writes, retried at once."),
                show_course("Queue", q.QUEUE, about="Resources that wait for a worker."),
            ]),
            ("Start of a job", 8, [
                show_course(
                    "From the resource to its Job", q.CREATE_TO_JOB, unit="s",
                    about="From the watch event of a resource to that of its first Job.",
                ),
                show_course(
                    "From the start to training", q.START_TO_STAGE, unit="s",
                    about="Mean of first attempts: until all ranks have joined, and until the first step.",
                ),
            ]),
            ("API server", 9, [
                show_course("Calls", q.CALLS, unit="reqps", stacked=True, about="Without watches."),
                show_course("Responses", q.ANSWERS, unit="reqps", stacked=True, about="HTTP status; 0: no response."),
            ]),
            ("Process", 8, [
                show_course("CPU", q.OPERATOR_CPU, unit="none", about="Cores."),
                show_course("Memory", q.OPERATOR_MEMORY, unit="bytes", about="Resident."),
                show_course("Open files", q.OPERATOR_FILES, about="Including connections."),
            ]),
        ],
    )  # fmt: skip


BOARDS: dict[str, Callable[[], dashboard.Dashboard]] = {
    "fleet": build_fleet, "job": build_job, "operator": build_operator,
}  # fmt: skip


def _start(uid: str, title: str, about: str) -> dashboard.Dashboard:
    builder = dashboard.Dashboard(title).uid(uid).description(about).tags(["ddp-operator"]).readonly()
    builder = (
        builder.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(board.DashboardCursorSync.CROSSHAIR)
    )
    link = dashboard.DashboardLink("DDP dashboards").type(board.DashboardLinkType.DASHBOARDS).tags(["ddp-operator"])
    builder = builder.link(link.as_dropdown(True).keep_time(True))
    return builder.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))


def _many(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable with several values. "All" also matches series without the label."""
    return _one(name, label, query).multi(True).include_all(True).all_value(".*")


def _one(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable with one value. It is empty if no series has the label, and then matches these series."""
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    return variable.refresh(board.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(board.VariableSort.ALPHABETICAL_ASC)


def _link_to_job(labels: str) -> dashboard.DashboardLink:
    """Return a link to the dashboard of the job with these labels."""
    chosen = "".join(f"&var-{name}=${{{labels}.{name}}}" for name in ("cluster", "namespace", "ddp_job"))
    url = f"/d/ddp-job?${{__url_time_range}}&var-datasource=${{datasource}}{chosen}"
    return dashboard.DashboardLink("Dashboard of this job").url(url)


def _link_to_logs() -> dashboard.DashboardLink:
    """Return a link to the log of a series' pod in Grafana's Explore."""
    query = {"refId": "A", "expr": '{namespace="${namespace}", pod="${__field.labels.pod}"}'}
    times = {"from": "${__from}", "to": "${__to}"}
    pane = {"datasource": "${logs}", "queries": [query], "range": times}
    panes = quote(json.dumps({"logs": pane}), safe="${}_.:,")
    return dashboard.DashboardLink("Log of this pod").url(f"/explore?schemaVersion=1&panes={panes}").target_blank(True)


def _mark(name: str, query: q.Query, colour: str) -> Any:
    mark = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
    return mark.expr(query.expr)
