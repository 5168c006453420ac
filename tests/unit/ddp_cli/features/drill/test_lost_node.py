"""`ddp drill --lose-node` without a cluster: what it measures, and how it judges a loss and the return."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_cli.commands.io import CommandError
from ddp_cli.features.drill.lost_node import ChosenPod, JobFacts, Sighting
from ddp_cli.features.drill.node_drill import lose_node
from ddp_cli.features.drill.node_target import read_facts
from ddp_cli.features.drill.pods import RunEnded
from ddp_cli.features.drill.recovery import Sample
from ddp_operator.api.status import Restarts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from tests.support.builders import NOW

POD = ChosenPod("mine-1-1-x", "uid-old", "gpu-7")
FINE = JobFacts(uids=frozenset({"uid-old"}))
SILENT = FINE._replace(silent="NodeSilent")
LOST = FINE._replace(silent="NodeSilent", avoided=("gpu-7",))
REPLACED = JobFacts(avoided=("gpu-7",), restarts=1, uids=frozenset({"uid-new"}))
BACK = REPLACED._replace(avoided=())


def sample(moment: float, step: int, made: int | None = None, restarts: int = 0, attempt: int = 1) -> Sighting:
    return Sighting(moment, sample=Sample(moment, attempt, step, step if made is None else made, restarts))


def facts(moment: float, state: JobFacts) -> Sighting:
    return Sighting(moment, facts=state)


START = [facts(0, FINE), sample(1, 5), facts(2, FINE), sample(10, 40), sample(11, 40)]
LOSS = [*START, facts(15, SILENT), facts(20, LOST)]
RECOVERY = [*LOSS, facts(21, REPLACED), sample(27, 41, made=1, restarts=1)]
RETURN = [*RECOVERY, facts(28, REPLACED), facts(50, REPLACED), facts(118, BACK)]


class FakeTarget:
    """A job that is seen as given. The clock is the time of what was seen last."""

    def __init__(self, *seen: Sighting, end: str = "") -> None:
        self._seen = seen
        self._end = end
        self.now = 0.0

    def choose(self) -> ChosenPod:
        return POD

    def sightings(self) -> Iterator[Sighting]:
        for sighting in self._seen:
            self.now = sighting.time
            yield sighting
        if self._end:
            raise RunEnded(self._end)


def run(*seen: Sighting, end: str = "", output: str = "json", timeout: float = 100.0) -> None:
    target: Any = FakeTarget(*seen, end=end)
    lose_node(target, output, after=3, timeout=timeout, clock=lambda: target.now)


def read(capsys: pytest.CaptureFixture[str], *seen: Sighting) -> dict[str, Any]:
    run(*seen)
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_loss_is_measured_from_the_last_step_and_the_return_from_the_recovery(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read(capsys, *RETURN) == {
        "node": "gpu-7",
        "pod": "mine-1-1-x",
        "reason": "NodeSilent",
        "namedSeconds": 5.0,
        "lostSeconds": 10.0,
        "recoverySeconds": 17.0,
        "stepsLost": 0,
        "counted": False,
        "returnSeconds": 91.0,
        "restartsAfterRecovery": 0,
        "podLeft": False,
        "verdict": "recovered",
    }


def test_person_is_told_what_to_do_and_reads_the_result_before_the_return(capsys: pytest.CaptureFixture[str]) -> None:
    run(*RECOVERY, output="text")
    out, err = capsys.readouterr()
    assert "Pod mine-1-1-x is on node gpu-7." in err
    assert "Start node gpu-7 again" in err
    assert out.splitlines() == [
        "node        gpu-7, with pod mine-1-1-x; times from the last step before",
        "named       5.0 s (NodeSilent)",
        "lost        10.0 s",
        "next step   17.0 s (the pod was replaced)",
        "steps lost  0 (at step 40, resumed from 40)",
        "return      not within the time",
        "verdict     recovered",
    ]


def test_spare_is_faster_than_the_declaration(capsys: pytest.CaptureFixture[str]) -> None:
    seen = [*START, facts(15, SILENT), sample(17, 41, made=1, restarts=1), facts(22, LOST)]
    result = read(capsys, *seen)
    assert (result["recoverySeconds"], result["lostSeconds"]) == (7.0, 12.0)


def test_loss_that_is_never_declared_awaits_no_return(capsys: pytest.CaptureFixture[str]) -> None:
    seen = [*START, facts(15, SILENT), sample(17, 41, made=1, restarts=1), facts(18, FINE), facts(80, FINE)]
    result = read(capsys, *seen)
    assert (result["lostSeconds"], result["returnSeconds"], result["podLeft"]) == (None, None, None)


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ([sample(27, 21, made=1, restarts=1)], "steps were repeated"),
        ([facts(26, REPLACED._replace(counted=1)), sample(27, 41, made=1, restarts=1)], "counted against maxRestarts"),
        ([RECOVERY[-1], facts(30, REPLACED), facts(90, BACK._replace(restarts=2))], "restarted again"),
        ([RECOVERY[-1], facts(90, BACK._replace(uids=frozenset({"uid-old"})))], "pod mine-1-1-x still exists"),
        ([facts(130, REPLACED)], "training did not resume"),
    ],
)
def test_verdict_names_what_should_not_be(
    last: list[Sighting], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict in read(capsys, *LOSS, *last)["verdict"]


@pytest.mark.parametrize(
    ("seen", "end", "message"),
    [
        ([sample(1, 0), sample(500, 0)], "", "has not completed 3 steps"),
        ([*START, facts(150, FINE)], "", "node gpu-7 was not lost within 100 s"),
        (START, "Succeeded", r"the job ended \(Succeeded\) during the drill"),
    ],
)
def test_drill_without_result_names_the_reason(seen: list[Sighting], end: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*seen, end=end)


def test_status_is_read_as_what_it_states_about_a_lost_node() -> None:
    status = replace(Status(attempt=2, failed_nodes=("a",)), restarts=Restarts(all=3, used=1))
    for reason, silent in (
        (other_reasons.NODE_SILENT, other_reasons.NODE_SILENT),
        (other_reasons.NODE_NOT_READY, other_reasons.NODE_NOT_READY),
        (other_reasons.STALLED, ""),
    ):
        conditions = c.merge_conditions((), [c.Fact(c.PROGRESSING, "False", reason)], NOW, 1)
        seen = read_facts(replace(status, conditions=conditions), frozenset({"u"}))
        assert seen == JobFacts(silent, ("a",), 2, 3, 1, frozenset({"u"}))
    assert read_facts(Status(), frozenset()).silent == ""
