"""Configurations of a launcher and pods for its tests, with defaults for values that a test does not need."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddp_pod.base.pod import Pod
from ddp_pod.contract.plan import VERSION, PodPlan, encode_plan

CONFIG = PodPlan(
    version=VERSION,
    nodes=1,
    spares=0,
    nproc_per_node=1,
    elastic=False,
    in_place_restarts=0,
    restarts_without_progress=None,
    join_timeout_seconds=600,
    non_retryable_exit_codes=(),
    success_policy="AllNodes",
    auto_instrument=True,
    warm_start=True,
)


def encoded_config(**changes: Any) -> dict[str, str]:
    """Return the variable that contains a configuration."""
    return {"DDP_LAUNCHER_CONFIG": encode_plan(dataclasses.replace(CONFIG, **changes))}


def launcher_pod(runtime: object, **changes: Any) -> Pod:
    """Return a pod whose runtime directory is ``runtime``."""
    own = {"node": 0, "master": "127.0.0.1", "port": 29400, "grace": 30.0, "metrics_port": 0, "oom_kills": 0}
    return Pod(**{**vars(CONFIG), **own, "runtime": str(runtime), **changes})
