"""When the record of an ended job is stored, and the condition HistoryStored. Pure.

The end of the Job that stores it changes nothing but the condition, and the Job is deleted afterwards.
"""

from datetime import timedelta
from typing import Final

from ddp_operator.api.cluster import controller_of
from ddp_operator.api.record import name_record
from ddp_operator.decide.conditions import Fact, is_finished
from ddp_operator.decide.hooks import feature_job_name
from ddp_operator.decide.state import AT_ONCE, FeatureAction, Observation, Remark, State
from ddp_operator.decide.views import JobView
from ddp_operator.features.history.fields import FIELDS, name_place

HISTORY_STORED: Final = "HistoryStored"
"""The condition. Its reasons are the next two."""
STORED: Final = "Stored"
NOT_STORED: Final = "NotStored"
STORE: Final = FeatureAction(FIELDS.feature, "store")
DELETE: Final = FeatureAction(FIELDS.feature, "delete")
PATIENCE: Final = timedelta(minutes=15)
"""Longest time after the end of a job to store its record. It includes the ten minutes of the Job."""
_LATER: Final = 10.0


def review(state: State) -> Remark | None:
    """Return what to do for the record; None: nothing, or nothing more."""
    status = state.status
    ended = status.completion_time
    if not is_finished(status):
        return None
    view = find_job(state.observation, state.job.name)
    if FIELDS.read(state.spec).history is None or ended is None or status.condition(HISTORY_STORED) is not None:
        return None if view is None or view.deleting else Remark(actions=(DELETE,))

    seconds_left = (ended + PATIENCE - state.now).total_seconds()
    refusal = state.refusal
    if view is not None and view.complete:
        record = f"{name_place(state.spec)}/{name_record(state.job)}"
        message = (
            f"{record}; after the deletion of the job: ddp report {state.job.name} --history {name_place(state.spec)}"
        )
        fact = Fact(HISTORY_STORED, "True", STORED, message)
    elif refusal is not None:
        fact = Fact(HISTORY_STORED, "False", NOT_STORED, refusal.message)
    elif seconds_left <= 0 or (view is not None and view.failed):
        problem = "no Job could be created" if view is None else _find_problem(state, view) or view.failed_message
        fact = Fact(HISTORY_STORED, "False", NOT_STORED, problem or "no pod has stored the record in time")
    else:
        actions = (STORE,) if view is None else ()
        return Remark(actions=actions, wait=min(seconds_left, _LATER), holds=True)
    return Remark(fact, wait=AT_ONCE, holds=True)


def find_job(observation: Observation, name: str) -> JobView | None:
    """Return the Job that stores the record of a job of this name."""
    own = feature_job_name(name, FIELDS.feature)
    return next((view for view in observation.feature_jobs if view.name == own), None)


def _find_problem(state: State, view: JobView) -> str:
    """Return the problem of the newest pod that has one; empty: none has."""
    own = [pod for pod in state.observation.feature_pods if controller_of(pod.raw).get("uid") == view.uid]
    problem = ""
    for pod in sorted(own, key=lambda pod: pod.created):
        ending = f"{pod.termination.message}; {pod.termination.remedy}" if pod.termination else pod.waiting_message
        problem = ending.removesuffix("; ") or problem
    return problem
