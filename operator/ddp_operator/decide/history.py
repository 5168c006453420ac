"""Storing of the record of an ended job, before its time to live may delete it, and the condition HistoryStored. Pure.

A Job without GPUs stores the record. Its end changes nothing but the condition, and the Job is deleted afterwards.
"""

from datetime import timedelta
from typing import Final

from ddp_operator.api.record import name_place, name_record
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, set_conditions
from ddp_operator.decide.state import AT_ONCE, Decision, DeleteJob, State, StoreHistory

PATIENCE: Final = timedelta(minutes=15)
"""Longest time after the end of a job to store its record. It includes the ten minutes of the Job."""
_LATER: Final = 10.0


def keep_history(state: State) -> Decision:
    """Return what to do for the record. ``requeue_after`` is None once nothing is left to do."""
    status = state.status
    ended = status.completion_time
    history = state.observation.history
    view = history.view if history is not None else None
    if state.spec.history is None or ended is None or status.condition(c.HISTORY_STORED) is not None:
        is_obsolete = view is not None and not view.deleting
        return Decision(status, (DeleteJob(view.name, view.uid),) if view is not None and is_obsolete else ())

    seconds_left = (ended + PATIENCE - state.now).total_seconds()
    refusal = state.refusal
    if view is not None and view.complete:
        record = f"{name_place(state.spec)}/{name_record(state.job)}"
        message = (
            f"{record}; after the deletion of the job: ddp report {state.job.name} --history {name_place(state.spec)}"
        )
        fact = Fact(c.HISTORY_STORED, "True", c.STORED, message)
    elif refusal is not None:
        fact = Fact(c.HISTORY_STORED, "False", c.NOT_STORED, refusal.message)
    elif seconds_left <= 0 or (view is not None and view.failed):
        problem = (history.problem or history.view.failed_message) if history is not None else "no Job could be created"
        fact = Fact(c.HISTORY_STORED, "False", c.NOT_STORED, problem or "no pod has stored the record in time")
    else:
        actions = (StoreHistory(),) if view is None else ()
        return Decision(status, actions, min(seconds_left, _LATER))
    return Decision(set_conditions(status, [fact], state.now, state.job.generation), requeue_after=AT_ONCE)
