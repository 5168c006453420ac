"""The three dashboards. Their uids are stable: links to them and alerts that name them go on working."""

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
    """All jobs of the chosen clusters and namespaces."""
    of_series = _link_to_job("__field.labels")
    return lay_out(
        _start("ddp-fleet", "DDP: fleet", "All training jobs of the chosen namespaces.")
        .with_variable(_many("cluster", "Cluster", "label_values(ddp_launcher_phase, cluster)"))
        .with_variable(
            _many("namespace", "Namespace", 'label_values(ddp_launcher_phase{cluster=~"$cluster"}, namespace)')
        ),
        [
            ("Now", 4, [
                show_number("Jobs that train", q.FLEET_RUNNING, about="Jobs with a pod whose workers run."),
                show_number("Jobs that wait", q.FLEET_WAITING, about="Jobs whose pods wait for their peers."),
                show_number("Ranks", q.FLEET_RANKS, about="Worker processes."),
                show_number("GPUs in use", q.FLEET_GPUS, about="Ranks that hold device memory; one rank has one GPU."),
                show_number(
                    "Goodput", q.FLEET_GOODPUT, unit="percentunit", steps=GOODPUT,
                    about="Share of the time that took jobs forward, since each began (docs/metrics.md).",
                ),
            ]),
            ("Jobs", 10, [
                show_table(
                    "Jobs", q.FLEET_TABLE, about="One row a job; its name leads to its own dashboard.",
                    links={"ddp_job": _link_to_job("__data.fields")},
                    units={"done": "percentunit", "validation accuracy": "percentunit", "last step ago": "s"},
                ),
            ]),
            ("Course", 8, [
                show_course(
                    "Samples a second", q.FLEET_RATES, link=of_series, about="Of all ranks of a job together."
                ),
                show_course("Pods by phase", q.FLEET_PODS_BY_PHASE, stacked=True, about="As their launchers say."),
            ]),
            ("As the operator sees it", 8, [
                show_course("Jobs by phase", q.FLEET_JOBS_BY_PHASE, stacked=True, about="Also those without a pod."),
                show_course(
                    "Jobs without all of their pods", q.FLEET_WAITING_WHY, stacked=True,
                    about="By the reason of the condition Scheduled: Unschedulable, ImagePull and others.",
                ),
                show_course(
                    "Failures by category", q.FLEET_FAILURES, stacked=True,
                    about="In the hour before; of all namespaces.",
                ),
                show_course(
                    "Restarts by level", q.FLEET_RESTARTS_BY_LEVEL, stacked=True,
                    about="In the hour before. process: in the same pods; pod: replaced; group: a new attempt.",
                ),
                show_course("Ended jobs", q.FLEET_FINISHED, stacked=True, about="In the hour before."),
            ]),
            ("Losses", 8, [
                show_course(
                    "Goodput", q.FLEET_GOODPUT_BY_JOB, unit="percentunit", highest=1, link=of_series,
                    about="Of the hour before, the share in steps that were kept: what was taken twice is lost.",
                ),
                show_course(
                    "Goodput since the start", q.FLEET_GOODPUT, unit="percentunit", highest=1,
                    about="As the status says it of jobs that are not over, start-up and waiting included.",
                ),
                show_course(
                    "GPU hours by purpose", q.FLEET_GPU_HOURS, stacked=True,
                    about="In the hour before, as they are in status.usage: what GPUs were held for, or lost to.",
                ),
                show_course(
                    "Share of time in steps", q.FLEET_TIME_IN_STEPS, unit="percentunit", highest=1, link=of_series,
                    about="The rest goes into start-up, waiting for pods, validation and checkpoints.",
                ),
                show_course(
                    "Restarts", q.FLEET_RESTARTS, link=of_series,
                    about="Restarts in the same pods and attempts after the first one, in the hour before.",
                ),
            ]),
        ],
    )  # fmt: skip


def build_job() -> dashboard.Dashboard:
    """One job."""
    builder = _start("ddp-job", "DDP: job", "One training job: is it learning, how fast, and what holds it up?")
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
            ("Progress", 4, [
                show_number("Done", q.JOB_PROGRESS, unit="percentunit", decimals=1, about="Steps taken of all steps."),
                show_number("Time left", q.JOB_TIME_LEFT, unit="s", decimals=0, about="Steps left, at this rate."),
                show_number("Epoch", [q.JOB_EPOCH, q.JOB_EPOCHS], about="The current one, counted from 1, of all."),
                show_number("Ranks", q.JOB_RANKS, about="The world size."),
                show_number("Samples a second", q.JOB_RATE, decimals=0, about="Of all ranks together."),
                show_number("Last step ago", q.JOB_LAST_STEP, unit="s", decimals=0, steps=LAST_STEP, about="Any rank."),
                show_number("Non-finite losses", q.JOB_NON_FINITE, steps=ANY_IS_BAD, about="NaN or infinity."),
            ]),
            ("Learning", 9, [
                show_course(
                    "Loss", [q.JOB_LOSS, q.JOB_LOSS_MAX, q.JOB_VALIDATION_LOSS], unit="none",
                    about="Training: mean of each rank's batches since its last log line.",
                ),
                show_course(
                    "Validation accuracy", q.JOB_VALIDATION_ACCURACY, unit="percentunit", highest=1,
                    about="Over all ranks; every sample counts once.",
                ),
                show_course("Learning rate", q.JOB_LEARNING_RATE, unit="sci", about="Of the last step."),
                show_course("Gradient norm", q.JOB_GRAD_NORM, about="Before clipping; only with clip_norm."),
            ]),
            ("Speed", 9, [
                show_course("Samples a second", q.JOB_RATE, about="Of all ranks together."),
                show_course("Tokens a second", q.JOB_TOKEN_RATE, about="Of all ranks together; of language models."),
                show_course("Steps a second", q.JOB_STEP_RATE, about="Also of scripts that count no samples."),
                show_course(
                    "A mean step", [q.JOB_STEP_DATA, q.JOB_STEP_COMPUTE, q.JOB_STEP_WAIT], unit="s", stacked=True,
                    about="Where a step's time goes. Much data: a slow loader. Much wait: a slow rank or network.",
                ),
                show_course("Step time", q.JOB_STEP_QUANTILES, unit="s", about="Of rank 0, which waits for all."),
            ]),
            ("Stragglers", 9, [
                show_rows(
                    "Own work a step, by rank", q.JOB_RANK_WORK, unit="s",
                    about="Data and computation before the wait for others; the 32 slowest. An outlier slows all.",
                ),
                show_course("Slowest rank", q.JOB_STRAGGLER, about="Own work against the median rank's."),
                show_course(
                    "GPU memory", q.JOB_GPU_MEMORY, unit="bytes",
                    about="Most that a rank's tensors have held; the 32 highest.",
                ),
            ]),
            ("GPUs, where dcgm-exporter is scraped", 8, [
                show_course(
                    "GPU utilisation", q.JOB_GPU_UTILISATION, unit="percent", highest=100, link=to_logs,
                    about="Share of the time in which a kernel ran; the 32 lowest.",
                ),
                show_course("GPU power", q.JOB_GPU_POWER, unit="watt", link=to_logs, about="Drawn now; the 32 lowest."),
                show_course(
                    "GPU memory in use", q.JOB_GPU_MEMORY_SHARE, unit="percentunit", highest=1, link=to_logs,
                    about="Of the device's capacity, PyTorch's cache and other processes included; the 32 highest.",
                ),
                show_course(
                    "XID errors", q.JOB_GPU_XID, link=to_logs,
                    about="The last error of the driver, of GPUs that had one. NVIDIA's XID catalogue has the numbers.",
                ),
            ]),
            ("Safety", 8, [
                show_course(
                    "Steps at risk", q.JOB_CHECKPOINT_LAG, about="Steps that a failure now would cost."
                ),
                show_course("Checkpoint", q.JOB_CHECKPOINT_SECONDS, unit="s", about="From the snapshot to the rename."),
                show_course("Pods by phase", q.JOB_PODS_BY_PHASE, stacked=True, about="As their launchers say."),
                show_course(
                    "Restarts in the same pods", q.JOB_RESTARTS, link=to_logs,
                    about="Of the pods that run, those with the most.",
                ),
            ]),
        ],
    )  # fmt: skip


def build_operator() -> dashboard.Dashboard:
    """The operator itself."""
    return lay_out(
        _start("ddp-operator", "DDP: operator", "Is the operator healthy, and can the API server keep up?")
        .with_variable(_many("cluster", "Cluster", "label_values(ddp_operator_queue_depth, cluster)")),
        [
            ("Now", 4, [
                show_number("Operators", q.OPERATORS, steps=NONE_IS_BAD, about="None: jobs run on, none starts."),
                show_number("Leaders", q.LEADERS, steps=NONE_IS_BAD, about="None: nothing is started."),
                show_number("Waiting", q.QUEUE, steps=((100, RED),), about="Resources that wait for a worker."),
                show_number("Reconciles that fail", q.ERROR_SHARE, unit="percentunit", steps=((0, GREEN), (0.1, RED)),
                            about="Lost races left out."),
                show_number("Calls a reconcile", q.CALLS_PER_RECONCILE, decimals=1, about="To the API server."),
            ]),
            ("Work", 9, [
                show_course("Reconciles", q.RECONCILES, unit="ops", about="A second."),
                show_course("Time of a reconcile", q.RECONCILE_QUANTILES, unit="s", about="Calls included."),
                show_course("Errors by cause", q.ERRORS, unit="ops", about="Conflict: a lost race, repeated at once."),
                show_course("Queue", q.QUEUE, about="Resources that wait for a worker."),
            ]),
            ("Start of a job", 8, [
                show_course(
                    "From the resource to its Job", q.CREATE_TO_JOB, unit="s",
                    about="From the news of a new resource to that of its first Job.",
                ),
                show_course(
                    "From the start to training", q.START_TO_STAGE, unit="s",
                    about="First attempts, mean: until all ranks have joined, and until the first step.",
                ),
            ]),
            ("API server", 9, [
                show_course("Calls", q.CALLS, unit="reqps", stacked=True, about="Watches not counted."),
                show_course("Answers", q.ANSWERS, unit="reqps", stacked=True, about="By HTTP status; 0: none came."),
            ]),
            ("Process", 8, [
                show_course("CPU", q.OPERATOR_CPU, unit="none", about="Cores."),
                show_course("Memory", q.OPERATOR_MEMORY, unit="bytes", about="Resident."),
                show_course("Open files", q.OPERATOR_FILES, about="Connections count as well."),
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
    others = dashboard.DashboardLink("DDP dashboards").type(board.DashboardLinkType.DASHBOARDS).tags(["ddp-operator"])
    builder = builder.link(others.as_dropdown(True).keep_time(True))
    return builder.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))


def _many(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a choice of several; all of them is every value, none at all too (a Prometheus of one cluster)."""
    return _one(name, label, query).multi(True).include_all(True).all_value(".*")


def _one(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a choice of one; nothing to choose from is the empty value, which a series without the label matches."""
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    return variable.refresh(board.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(board.VariableSort.ALPHABETICAL_ASC)


def _link_to_job(labels: str) -> dashboard.DashboardLink:
    """Return a link to the dashboard of the job that these labels name."""
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
