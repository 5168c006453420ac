"""Did a job whose ranks have exited with 0 train to its end?"""

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.state import Observation, State
from ddp_operator.decide.transitions import Doubted, find_transitions
from ddp_operator.features.completion import FEATURE, account
from tests.support.builders import NOW, child_job, job
from tests.support.decisions import run_pass
from tests.support.group_reports import read_texts, succeed

STARTED = Status(attempt=1, job_name="train-1", start_time=NOW, attempt_time=NOW).remember(nodes=2)
run = partial(run_pass, status=STARTED, hooks=Hooks((FEATURE,)))


class TestCompletion:
    """Did a job whose ranks have exited with 0 train to its end?"""

    STEPS = {"step": 10.0}
    SHORT = {"rank": 0, "step": 10.0, "total": 30.0}
    TRACE = {"rank": 1, "step": 10.0, "exception": "ValueError: bad", "secondary": False, "processes": []}
    LOST = {**SHORT, "exception": "RuntimeError: Connection closed by peer", "secondary": True}
    LEFT = {"rank": 0, "processes": ["python train.py"]}
    KEPT = {"rank": 1, "step": 10.0, "keeper": "thread uploader keeps its process alive"}
    NAN = {**STEPS, "lostLossStep": 7.0}

    @pytest.mark.parametrize(
        ("words", "reason", "parts"),
        [
            (({"progress": {**STEPS, "totalSteps": 10.0}}, {}), "AllStepsMade", ["step 10 of 10"]),
            (({"progress": STEPS}, {}), "TotalUnknown", []),
            (({}, {}), "NoStep", ["without a visible step"]),
            (({"progress": NAN}, {}), "LossNotFinite", ["the loss is nan since step 7", "last step was 10"]),
            (({"progress": STEPS, "ends": [SHORT]}, {}), "EndedShort", ["rank 0", "at step 10 of 30"]),
            (({"ends": [LEFT]}, {}), "ProcessesLeft", ["1 of its processes still ran: python train.py"]),
            (({"progress": STEPS}, {"ends": [KEPT]}), "EndedByLauncher", ["rank 1 ended", "because thread uploader"]),
            (({"ends": [SHORT]}, {"ends": [KEPT]}), "EndedShort", ["rank 0 ended", "so did 1 more"]),
            (({"ends": [{**KEPT, **TRACE}]}, {}), "TracebackAtEnd", ["because thread uploader"]),
            (({"ends": [LOST]}, {"ends": [TRACE]}), "TracebackAtEnd", ["rank 1", "ValueError: bad", "1 other rank"]),
            (({"ends": [{**TRACE, "rank": 0}]}, {"ends": [TRACE]}), "TracebackAtEnd", ["rank 0", "so did 1 more rank"]),
        ],
    )  # fmt: skip
    def test_end_of_the_ranks_is_condition(self, words: Any, reason: str, parts: list[str]) -> None:
        decision = run(
            *(succeed(index, **own) for index, own in enumerate(words)), jobs=[child_job(conditions={"Complete": ""})]
        )
        status = decision.status
        is_doubtful = reason not in ("AllStepsMade", "TotalUnknown")
        assert (status.phase, status.reason) == ("Succeeded", reason if is_doubtful else "")
        _, known, message = read_texts(decision, "TrainingComplete")
        assert known == reason
        assert all(part in message for part in parts), message
        assert (reason in [event.reason for event in list_transition_events(STARTED, status)]) is is_doubtful
        assert (Doubted(reason) in find_transitions(STARTED, status, NOW)) is is_doubtful

    def test_job_that_hides_its_steps_is_not_doubted(self) -> None:
        pods = succeed(0), succeed(1)
        complete = child_job(conditions={"Complete": ""})
        decision = run(*pods, jobs=[complete], metrics={"autoInstrument": False})
        assert decision.status.reason == ""


def test_reason_of_success_is_most_important_doubt() -> None:
    doubtful = [
        c.Fact(c.TRAINING_COMPLETE, "Unknown", doubts.NO_STEP),
        c.Fact(c.TRAINS_AS_ONE, "False", doubts.NO_PROCESS_GROUP),
    ]
    status = Status(phase="Succeeded", conditions=c.merge_conditions((), doubtful, NOW, 1))
    state = State(job(), Observation(), NOW)
    assert account(state, status).reason == "NoProcessGroup"
    assert account(state, replace(status, phase="Failed")).reason == ""
