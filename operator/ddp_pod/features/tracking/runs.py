"""One run in experiment trackers for all attempts of a job: ``spec.tracking`` in a pod."""

import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...base.files import BOOTSTRAP, log, read_json, write_json
from ...contract.names import ENV_COMPLETION_INDEX, ENV_RUNTIME_DIR, ENV_TRACKING_RUN
from ...contract.processes import set_parent_death_signal
from ...contract.report import TrackedRun

MLFLOW_URI = "MLFLOW_TRACKING_URI"
MLFLOW_RUN = "MLFLOW_RUN_ID"
MLFLOW_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
WANDB_RUN = "WANDB_RUN_ID"
TAG = "ddp.run"  # identifies the run in MLflow, which generates the ids of its runs
_FILE = "mlflow-run.json"
_SECONDS_FOR_RUN = 60.0  # for which rank 0 waits; MLflow's client takes seconds to import
# With the defaults of MLflow's client an unreachable server would delay a rank for minutes.
_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
_PROBLEM_LIMIT = 300  # characters


class MlflowRun(NamedTuple):
    """The job's run in MLflow. ``problem``: why there is none."""

    run: str = ""
    experiment: str = ""
    problem: str = ""


def start_tracking(runtime: str) -> None:
    """In pod 0, start a process that finds or creates the job's run in MLflow while PyTorch is imported."""
    env = os.environ
    if not env.get(MLFLOW_URI) or env.get(MLFLOW_RUN):
        return
    import subprocess

    command = [sys.executable, BOOTSTRAP, "tracking", str(os.getpid()), os.path.join(runtime, _FILE)]
    subprocess.Popen(command, env={**_RETRIES, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(argv: Sequence[str]) -> int:
    """Write the job's run in MLflow to a file. ``argv``: the launcher's pid, the file. Returns the exit code."""
    launcher, path = argv
    set_parent_death_signal(int(launcher))
    try:
        # MLflow's own client supports every kind of store and of login.
        run = find_run(importlib.import_module("mlflow").MlflowClient(), os.environ)
    except Exception as error:  # MLflow and its plugins raise many types; rank 0 logs the problem
        run = MlflowRun(problem=f"{type(error).__name__}: {error}")
    write_json(path, run._asdict())
    return 0


def find_run(client: Any, env: Mapping[str, str]) -> MlflowRun:
    """Return the job's run in MLflow: found by its tag, otherwise created."""
    job_run = env[ENV_TRACKING_RUN]
    experiment = env.get("MLFLOW_EXPERIMENT_ID", "0")
    name = env.get(MLFLOW_EXPERIMENT)
    if name:
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)

    runs = client.search_runs([experiment], f"tags.`{TAG}` = '{job_run}'", max_results=1)
    if runs:
        run = runs[0]
    else:
        run = client.create_run(experiment, run_name=env.get("MLFLOW_RUN_NAME"), tags={TAG: job_run})
    return MlflowRun(run.info.run_id, experiment)


def _read_run(path: str) -> MlflowRun:
    record = read_json(path)
    return MlflowRun(**{field: str(record.get(field, "")) for field in MlflowRun._fields})


def set_rank_variables() -> None:
    """Assign this rank's run: rank 0 continues the job's, as two processes that write one run mix their metrics."""
    env = os.environ
    job_run = env.get(ENV_TRACKING_RUN)
    if not job_run:
        return
    rank = env.get("RANK", "0")
    if rank != "0":
        if env.get(WANDB_RUN) == job_run:
            env[WANDB_RUN] = f"{job_run}-{rank}"
        return
    if env.get(MLFLOW_URI) and not env.get(MLFLOW_RUN):
        _set_mlflow_run(env)


def _set_mlflow_run(env: "os._Environ[str]") -> None:
    path = os.path.join(env[ENV_RUNTIME_DIR], _FILE)
    deadline = time.monotonic() + _SECONDS_FOR_RUN
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    run = _read_run(path)
    if run.run:
        env[MLFLOW_RUN] = run.run
        return
    problem = " ".join((run.problem or f"no response within {_SECONDS_FOR_RUN:g} s").split())[:_PROBLEM_LIMIT]
    log(f"MLflow: cannot continue the job's run ({problem}); the script creates a separate run")


def list_tracked_runs(runtime: str) -> tuple[TrackedRun, ...]:
    """Return the run's web pages, in pod 0."""
    urls = {
        "mlflow": mlflow_url(os.environ, _read_run(os.path.join(runtime, _FILE))),
        "wandb": wandb_url(os.environ),
    }
    return tuple(TrackedRun(tracker, url) for tracker, url in urls.items() if url)


def is_tracked() -> bool:
    """Return whether this is pod 0 of a job with ``spec.tracking``."""
    env = os.environ
    return bool(env.get(ENV_TRACKING_RUN)) and env.get(ENV_COMPLETION_INDEX, "0") == "0"


def mlflow_url(env: Mapping[str, str], run: MlflowRun) -> str | None:
    """Return the web page of a run in MLflow; None if the run is unknown or stored in files."""
    from urllib.parse import quote, urlsplit, urlunsplit

    parts = urlsplit(env.get(MLFLOW_URI, ""))
    if parts.scheme not in ("http", "https") or not run.run:
        return None
    host = parts.netloc.rpartition("@")[2]  # without a password
    base = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    return f"{base}/#/experiments/{quote(run.experiment)}/runs/{quote(run.run)}"


def wandb_url(env: Mapping[str, str]) -> str | None:
    """Return the web page of the run in W&B; None if its owner is unknown or W&B is offline."""
    from urllib.parse import quote

    names = [env.get(name) for name in ("WANDB_ENTITY", "WANDB_PROJECT", WANDB_RUN)]
    if not all(names) or env.get("WANDB_MODE", "online") != "online":
        return None
    base = env.get("WANDB_BASE_URL", "").rstrip("/")
    if base in ("", "https://api.wandb.ai"):
        base = "https://wandb.ai"
    entity, project, run = (quote(str(name), safe="") for name in names)
    return f"{base}/{entity}/{project}/runs/{run}"
