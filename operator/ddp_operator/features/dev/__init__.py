"""Pods that stay between runs of changed code (`ddp dev`, ADR 0048): their fields, plan, and how a run failed.

The kernel accounts for the runs in ``decide/dev``: a loss, a restart and the end mean something else while pods are
held.
"""

import dataclasses
from datetime import timedelta
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import EPOCH
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import ObservedAttempt, observe_attempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.dev import release_pods
from ddp_operator.decide.diagnosis import build_last_failure
from ddp_operator.decide.failures import complete_end
from ddp_operator.decide.held_runs import describe_hold, describe_lost_code, record_run
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import State
from ddp_operator.features.dev.fields import FIELDS
from ddp_pod.contract.failure_table import CATEGORIES

_SAME_INCIDENT: Final = timedelta(minutes=2)


def record(state: State, status: Status) -> Status:
    """Return the status with the present run and its failure."""
    page = state.observation.page
    if page is None or page.dev is None:
        return status
    noted = record_run(status, page, state.now)
    if not observe_attempt(state, status, None).is_held:
        noted = replace(noted, dev=release_pods(noted.dev))
    return _record_failure(state, noted)


def _record_failure(state: State, status: Status) -> Status:
    """Return the status with the failure of the present run.

    A pod that is lost while it is held does not replace it, and it does not replace the loss of the pod that caused it.
    """
    page = state.observation.page
    pods = state.observation.pods_of(status.attempt)
    run = page.dev if page is not None else None
    failure = run.failure if run is not None and run.result == "Failed" else None
    pod = pods.newest.get(failure.pod_index or 0) or pods.newest.get(0) if failure is not None else None
    if failure is None or pod is None:
        return status
    latest = build_last_failure(status.attempt, pod, complete_end(failure))
    known = status.last_failure
    if known is not None:
        # The pod may have been replaced since.
        is_known = replace(known, pod=latest.pod, node_name=latest.node_name) == latest
        distance = abs((latest.time or EPOCH) - (known.time or EPOCH))
        is_symptom = CATEGORIES[latest.category].symptom and not CATEGORIES[known.category].symptom
        if is_known or (is_symptom and distance <= _SAME_INCIDENT):
            return status
    return replace(status, last_failure=latest)


def explain(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Return Progressing with how the run in held pods ended, or that its code is lost."""
    if fact.type != c.PROGRESSING or fact.reason not in (c.HELD, c.TRAINING):
        return fact
    status = record(attempt.state, attempt.reported)
    if fact.reason == c.TRAINING:
        lost_code = describe_lost_code(status.dev)
        return dataclasses.replace(fact, message=f"{fact.message}; {lost_code}") if lost_code else fact
    name = attempt.state.job.name
    todo = f"`ddp rerun {name}` runs changed code in them, `ddp release {name}` ends the job"
    return dataclasses.replace(fact, message=f"{describe_hold(status)}; {todo}")


FEATURE: Final = Feature(FIELDS.feature, maturity="beta", page="dev.md", fields=FIELDS, record=record, explain=explain)
