"""Progress and restarts in the termination messages of ended pods."""

import pytest

from ddp_operator.api.status import Progress, Status
from ddp_operator.decide.report import record_final_progress
from ddp_operator.decide.views import Pods, view_pod
from tests.support.builders import NOW, child_pod, last_words
from tests.support.decisions import present


def test_restarts_of_replaced_pod_are_counted_beside_its_successor() -> None:
    report = last_words("UserError", restarts=1)
    replaced = child_pod(0, "Failed", code=130, message=report, suffix="first", age=60)
    pods = Pods(map(view_pod, (replaced, child_pod(0))))
    assert record_final_progress(Status(), pods, NOW).restarts.in_place == 1


@pytest.mark.parametrize(("step", "total", "percent"), [(61, 400, "15.2%"), (401, None, None)])
def test_total_reported_while_running_is_kept_at_end_unless_step_exceeds_it(
    step: int, total: int | None, percent: str | None
) -> None:
    report = last_words("UserError", progress={"step": step})
    pods = Pods([view_pod(child_pod(1, "Failed", code=1, message=report))])
    status = Status(progress=Progress(step=60, total_steps=400, percent="15.0%"))
    progress = present(record_final_progress(status, pods, NOW).progress)
    assert (progress.step, progress.total_steps, progress.percent) == (step, total, percent)
