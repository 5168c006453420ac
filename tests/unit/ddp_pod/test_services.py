"""The hooks of the launcher's services: what they return, and what happens if they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ddp_pod.base.service import Answer, Conclusion, Ending, Service
from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.group_facts import DIFFERENT, TOGETHER, GroupFacts
from ddp_pod.contract.progress import RankProgress, Uploads
from ddp_pod.contract.report import TrackedRun
from ddp_pod.contract.run_report import Stall
from ddp_pod.supervise import services as module
from ddp_pod.supervise.services import Services

FAILURE = Failure("UserError", message="of a rank")
CALLS: dict[str, tuple[Callable[[Services], object], object]] = {
    "start": (lambda services: services.start(None), None),  # type: ignore[arg-type]
    "observe": (lambda services: services.observe({}), None),
    "list_watched": (lambda services: services.list_watched(), []),
    "find_timeout": (lambda services: services.find_timeout(), None),
    "follow": (lambda services: services.follow([]), None),
    "is_ready": (lambda services: services.are_ready(), True),
    "note": (lambda services: services.note("event"), None),
    "answer": (lambda services: services.answer("request"), None),
    "explain": (lambda services: services.explain(FAILURE), FAILURE),
    "find_awaited": (lambda services: services.find_awaited(), None),
    "log_state": (lambda services: services.log_state(), None),
    "forget": (lambda services: services.forget(), None),
    "list_processes": (lambda services: services.list_processes(), set()),
    "note_end": (lambda services: services.note_end(1), None),
    "finish": (lambda services: services.finish(Ending(True, None)), None),
    "complete": (lambda services: services.complete([RankProgress(3)]), [RankProgress(3)]),
    "report": (lambda services: services.report(), {}),
    "read_page": (lambda services: services.read_page("/page", ""), None),
    "conclude": (lambda services: services.conclude(), Conclusion()),
}
"""By the name of a hook: its call, and the result without the service."""


class Fake(Service):
    """A service with some hooks of a test."""

    name = "fake"

    def __init__(self, **hooks: Any) -> None:
        for name, hook in hooks.items():
            setattr(self, name, hook if callable(hook) else lambda *arguments, value=hook: value)


class Vital(Fake):
    """The same, and the pod must not train without it."""

    is_vital = True


def fail(*arguments: object) -> None:
    raise ValueError("a bug")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("result", [fail, lambda *arguments: threading.Lock()], ids=["raises", "garbage"])
def test_failing_hook_counts_is_logged_once_and_changes_nothing(
    name: str, result: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    call, expected = CALLS[name]
    working = Fake(list_processes={7}) if name == "list_processes" else Fake()
    services = Services([Fake(**{name: result}), working])
    for _ in range(3):
        assert call(services) == ({7} if name == "list_processes" else expected)
    assert services.faults == 3
    assert capsys.readouterr().err.count(f"internal error of the launcher in fake.{name};") == 1


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("observe", "complete", "report", "read_page")])
def test_fault_of_a_vital_service_is_the_launchers(name: str) -> None:
    call, _ = CALLS[name]
    with pytest.raises(ValueError, match="a bug"):
        call(Services([Vital(**{name: fail})]))


def test_fault_in_the_thread_that_reads_progress_ends_no_pod() -> None:
    noted: list[object] = []
    services = Services([Vital(observe=fail), Fake(observe=noted.append)])
    services.observe({0: RankProgress()})
    assert noted == [{0: RankProgress()}]
    assert services.faults == 1


def test_fault_in_a_page_ends_no_pod_and_another_service_answers() -> None:
    services = Services([Vital(read_page=fail), Fake(read_page=None), Fake(read_page=Stall(hangs=2))])
    assert services.read_page("/page", "") == b'{"hangs": 2}'
    assert services.faults == 1


def test_fault_in_the_report_ends_no_pod() -> None:
    services = Services([Vital(report=fail), Fake(report={"unreachable": "pod 0"})])
    assert services.report() == {"unreachable": "pod 0"}
    assert services.faults == 1


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("list_watched", [10**6]),
        ("list_watched", ["socket"]),
        ("find_timeout", -1.0),
        ("find_timeout", float("nan")),
        ("is_ready", "yes"),
        ("explain", "a failure"),
        ("complete", [3]),
        ("report", {"phase of the moon": 1}),
        ("report", "text"),
        ("conclude", Conclusion(uploads="all")),  # type: ignore[arg-type]
    ],
)
def test_result_of_another_type_is_a_fault(name: str, result: object) -> None:
    call, expected = CALLS[name]
    services = Services([Fake(**{name: result})])
    assert call(services) == expected
    assert services.faults == 1


def test_report_keeps_to_the_limits_of_its_readers() -> None:
    runs = tuple(TrackedRun("mlflow", f"https://runs/{number}") for number in range(9))
    services = Services([Fake(report={"runs": runs, "unreachable": 3.5, "stall": Stall(hangs=2)})])
    assert services.report() == {"runs": runs[:4], "unreachable": "", "stall": Stall(hangs=2)}


def test_hooks_are_joined() -> None:
    first = Fake(find_timeout=3.0, is_ready=True, answer=Answer.NOT_MINE, conclude=Conclusion("a"))
    second = Fake(find_timeout=2.0, is_ready=False, answer="reply", conclude=Conclusion("b", Uploads(step=3)))
    services = Services([first, second])
    assert services.find_timeout() == 2.0
    assert not services.are_ready()
    assert services.answer("request") == "reply"
    assert services.conclude() == Conclusion("a; b", Uploads(step=3))


def test_facts_of_a_feature_replace_those_of_the_kernel() -> None:
    own = GroupFacts(TOGETHER, 2)
    found = GroupFacts(DIFFERENT, 2, "rank 1 differs")
    services = Services(
        [
            Fake(report={"groups": own}, conclude=Conclusion(groups=own)),
            Fake(report={"groups": found}, conclude=Conclusion(groups=found)),
            Fake(report={}, conclude=Conclusion()),
        ]
    )
    assert services.report() == {"groups": found}
    assert services.conclude().groups == found


def test_end_of_the_pod_waits_for_vital_services_only() -> None:
    assert Services([Fake(is_finished=False), Vital()]).are_finished()
    assert not Services([Fake(), Vital(is_finished=False)]).are_finished()


def test_thread_that_fails_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BEFORE_NEXT_RUN", 0.0)
    over = threading.Event()
    runs = []

    class Threaded(Service):
        name = "threaded"

        def run(self) -> None:
            runs.append(1)
            if len(runs) < 3:
                raise OSError("a bug")
            over.set()

    services = Services([Threaded()])
    services.start(None)  # type: ignore[arg-type]
    assert over.wait(60)
    assert services.faults == 2
