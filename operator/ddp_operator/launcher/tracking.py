"""One run in the trackers of experiments over all attempts of a job: what ``spec.tracking`` needs of a pod."""

import importlib
import json
import os
import sys
import time
from typing import Any, Mapping, Optional, Sequence

from .contract import ENV_COMPLETION_INDEX, ENV_RUNTIME_DIR, ENV_TRACKING_RUN, METRIC_TRACKING
from .files import BOOTSTRAP, log, read_json, write_json
from .processes import set_parent_death_signal

MLFLOW_URI, MLFLOW_RUN, MLFLOW_EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"
WANDB_RUN = "WANDB_RUN_ID"
TAG = "ddp.run"  # of a run of MLflow, which chooses the ids of its runs itself
_FILE = "mlflow-run.json"
_PATIENCE_SECONDS = 60.0  # that rank 0 waits for its run: MLflow's client takes seconds to be imported
# Those of MLflow's client would keep a rank for minutes.
_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}


def start_tracking(runtime: str) -> None:
    """Have another process find or create the job's run in MLflow, while PyTorch is imported. In pod 0 alone."""
    env = os.environ
    if not _is_tracked(env) or not env.get(MLFLOW_URI) or env.get(MLFLOW_RUN):
        return
    import subprocess

    command = [sys.executable, BOOTSTRAP, "tracking", str(os.getpid()), os.path.join(runtime, _FILE)]
    subprocess.Popen(command, env={**_RETRIES, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def tracking_main(words: Sequence[str]) -> int:
    """``tracking <the launcher's pid> <file>``: write the id of the job's run in MLflow, or why there is none."""
    set_parent_death_signal(int(words[0]))
    try:
        # Its own client knows every kind of store and of login.
        found = find_run(importlib.import_module("mlflow").MlflowClient(), os.environ)
    except Exception as error:
        found = {"problem": f"{type(error).__name__}: {error}"}
    write_json(words[1], found)
    return 0


def find_run(client: Any, env: Mapping[str, str]) -> dict[str, str]:
    """Return run and experiment of the job in MLflow: found by the run's tag, else created."""
    experiment, name, run = env.get("MLFLOW_EXPERIMENT_ID", "0"), env.get(MLFLOW_EXPERIMENT), env[ENV_TRACKING_RUN]
    if name:
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
    runs = client.search_runs([experiment], f"tags.`{TAG}` = '{run}'", max_results=1)
    first = runs[0] if runs else client.create_run(experiment, run_name=env.get("MLFLOW_RUN_NAME"), tags={TAG: run})
    return {"run": first.info.run_id, "experiment": experiment}


def set_rank_variables() -> None:
    """Give this rank its run: rank 0 the job's own, since two processes that write to one mix their figures."""
    env = os.environ
    run = env.get(ENV_TRACKING_RUN)
    if not run:
        return
    rank = env.get("RANK", "0")
    if rank != "0":
        if env.get(WANDB_RUN) == run:
            env[WANDB_RUN] = f"{run}-{rank}"
    elif env.get(MLFLOW_URI) and not env.get(MLFLOW_RUN):
        found = _await_run(os.path.join(env[ENV_RUNTIME_DIR], _FILE))
        if found.get("run"):
            env[MLFLOW_RUN] = found["run"]
        else:
            problem = " ".join(str(found.get("problem", f"no answer in {_PATIENCE_SECONDS:g} s")).split())[:300]
            log(f"MLflow: no run to go on with ({problem}); what the script starts there is another run")


def _await_run(path: str) -> dict[str, Any]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    return read_json(path)


def build_tracking_rows(runtime: str) -> list[str]:
    """Return the series that name the pages of the run, in pod 0."""
    if not _is_tracked(os.environ):
        return []
    found = read_json(os.path.join(runtime, _FILE))
    urls = {"mlflow": mlflow_url(os.environ, found), "wandb": wandb_url(os.environ)}
    rows = [f'{METRIC_TRACKING}{{tracker="{name}",url={json.dumps(url)}}} 1' for name, url in urls.items() if url]
    head = [f"# HELP {METRIC_TRACKING} A page of the job's run in a tracker.", f"# TYPE {METRIC_TRACKING} gauge"]
    return head + rows if rows else []


def _is_tracked(env: Mapping[str, str]) -> bool:
    return bool(env.get(ENV_TRACKING_RUN)) and env.get(ENV_COMPLETION_INDEX, "0") == "0"


def mlflow_url(env: Mapping[str, str], found: Mapping[str, Any]) -> Optional[str]:
    """Return the page of a run on a server of MLflow; None: it is kept in files, or not known."""
    from urllib.parse import quote, urlsplit, urlunsplit

    parts = urlsplit(env.get(MLFLOW_URI, ""))
    if parts.scheme not in ("http", "https") or not found.get("run"):
        return None
    host = parts.netloc.rpartition("@")[2]  # without a password
    base = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    return f"{base}/#/experiments/{quote(str(found['experiment']))}/runs/{quote(str(found['run']))}"


def wandb_url(env: Mapping[str, str]) -> Optional[str]:
    """Return the page of the run in W&B; None: it is not known whose project it is, or nothing is sent."""
    from urllib.parse import quote

    names = [env.get(name) for name in ("WANDB_ENTITY", "WANDB_PROJECT", WANDB_RUN)]
    if not all(names) or env.get("WANDB_MODE", "online") != "online":
        return None
    base = env.get("WANDB_BASE_URL", "").rstrip("/")
    if base in ("", "https://api.wandb.ai"):
        base = "https://wandb.ai"
    entity, project, run = (quote(str(name), safe="") for name in names)
    return f"{base}/{entity}/{project}/runs/{run}"
