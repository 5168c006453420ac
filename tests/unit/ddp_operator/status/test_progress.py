"""Progress and restarts in the termination messages of ended pods."""

from ddp_operator.api.status import Status
from ddp_operator.status.observation import Pods
from ddp_operator.status.progress import record_final_progress
from ddp_operator.status.views import view_pod
from tests.support.builders import NOW, child_pod, last_words


def test_restarts_of_replaced_pod_are_counted_beside_its_successor() -> None:
    report = last_words("UserError", restarts=1)
    replaced = child_pod(0, "Failed", code=130, message=report, suffix="first", age=60)
    pods = Pods(map(view_pod, (replaced, child_pod(0))))
    assert record_final_progress(Status(), pods, NOW).restarts.in_place == 1
