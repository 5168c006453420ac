"""The report of a pod: its decoding within limits, and the progress that it shows."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddp_operator.api.status import InputStatus, Progress, Status
from ddp_operator.decide.input_texts import describe_inputs
from ddp_operator.decide.pace import RateMeter, build_paced_progress
from ddp_operator.decide.report import (
    Page,
    build_checkpoint,
    build_progress,
    record_final_progress,
)
from ddp_operator.decide.views import Pods
from ddp_operator.reading.objects import view_pod
from ddp_operator.reading.pages import decode_report
from ddp_pod.contract.progress import RankProgress, Uploads
from ddp_pod.contract.run_report import REPORT_LIMIT
from ddp_pod.contract.series import SERIES
from tests.support.builders import NOW, child_pod, decode, last_words, page
from tests.support.decisions import present

GOOD = RankProgress(
    step=40.0, steps=20.0, total_steps=100.0, samples=640.0, world_size=2.0, step_seconds=20.0, epoch=2.0, epochs=5.0,
    last_step_time=1763640000.0, checkpoint_step=30.0, loss=0.25,
)  # fmt: skip


class TestReport:
    def test_numbers_are_those_of_the_lowest_rank_that_has_them(self) -> None:
        ranks = [{"rank": 1, "loss": 9, "step": 7}, {"rank": 0, "loss": 0.25}]
        report = decode(page(phase="Running", restarts=3, ranks=ranks))
        assert (report.progress.loss, report.progress.step) == (0.25, 7)
        assert (report.phase, report.restarts, report.training) == ("Running", 3, True)
        assert [rank.step for rank in report.ranks] == [7, None]

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"x",
            b"[]",
            b"3",
            b"null",
            b'{"phase": ',
            b"\xff",
            b"[" * 9000,
            b'{"a": ' * 9000,
            b" " * (REPORT_LIMIT + 1),
        ],
    )
    def test_what_is_no_report_is_an_empty_one(self, data: bytes) -> None:
        assert decode_report(data) == Page()
        assert Page().is_empty

    @pytest.mark.parametrize(
        ("member", "value"),
        [
            ("phase", "Nonsense"), ("phase", 3), ("restarts", -4), ("restarts", 2**31), ("restarts", 1.5),
            ("restarts", True), ("ranks", {}), ("ranks", 5), ("lastFailure", "OOM"), ("groups", []), ("later", [1]),
            ("stall", {"seconds": -1}), ("stall", {"ranks": [3, "x"]}), ("unreachable", ["x"]), ("rates", {"steps": 1}),
        ],
    )  # fmt: skip
    def test_invalid_and_unknown_members_count_as_absent(self, member: str, value: Any) -> None:
        assert dataclasses.replace(decode(json.dumps({"version": 2, member: value})), members={}) == Page()

    def test_lists_and_texts_are_bounded_and_plain(self) -> None:
        text = "rank 1 is in go\U0001f3d6 (train.py:1)\x1b[31m" + "!" * 300
        ranks = [{"rank": rank, "state": "Lazy" if rank == 0 else "Busy", "what": text} for rank in range(9)]
        many = [{"rank": rank, "step": rank} for rank in range(300)]
        report = decode(page(ranks=many, stalled_ranks=ranks, stepHint="x" * 900))
        assert [rank.rank for rank in report.stall.ranks] == list(range(8))
        assert report.stall.ranks[1].what.startswith("rank 1 is in go (train.py:1)!!!")
        assert len(report.stall.ranks[1].what) == 200
        assert (len(report.step_hint), len(report.ranks)) == (500, 256)

    @pytest.mark.parametrize(
        ("numbers", "began"),
        [
            ({"step": 10, "steps": 4}, 6),
            ({"step": 1, "steps": 1}, 0),
            ({"step": 3, "steps": 4}, 0),
            ({"step": 10, "steps": 0}, None),
            ({"step": 10}, None),
            ({"steps": 4}, None),
            ({"step": 10, "steps": 4, "phase": "Rendezvous"}, None),
        ],
    )
    def test_first_step_of_workers_is_known_after_one_step(self, numbers: Any, began: int | None) -> None:
        assert decode(page(**numbers)).began_at == began

    def test_page_of_the_former_release_is_an_empty_report(self) -> None:
        """Its launcher has no `/report`; should a proxy answer with its metrics page, nothing is concluded from it."""
        text = '# TYPE ddp_step gauge\nddp_step{rank="0"} 5\nddp_launcher_phase{phase="Running"} 1\n'
        assert decode(text) == Page()


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)
MEMBERS = [
    "version",
    "phase",
    "restarts",
    "restartStep",
    "ranks",
    "stall",
    "preflight",
    "uploads",
    "groups",
    "lastFailure",
]
NUMBERS = st.dictionaries(st.sampled_from([*SERIES, "totalSteps", "lastStepTime", "lostLossStep"]), JSON, max_size=6)


@given(st.dictionaries(st.sampled_from(MEMBERS), JSON | st.lists(NUMBERS, max_size=3)))
def test_any_report_gives_a_storable_status(members: dict[str, Any]) -> None:
    report = decode_report(json.dumps(members).encode("utf-8", "surrogatepass"))
    progress = build_paced_progress(report.progress, None, RateMeter().measure(1, report.progress, 0.0))
    status = Status(progress=progress, checkpoint=build_checkpoint(report.progress, report.uploads))
    assert len(msgspec.json.encode(status)) < 9000


def progress_of(progress: RankProgress, before: Progress | None = None) -> Progress:
    return present(build_progress(progress, before))


class TestProgress:
    def test_all_numbers_are_shown(self) -> None:
        assert build_progress(GOOD) == Progress(
            epoch=2, epochs=5, step=40, total_steps=100, percent="40.0%", loss="0.25",
            last_step_time=datetime(2025, 11, 20, 12, tzinfo=UTC),
        )  # fmt: skip
        assert build_progress(RankProgress()) is None

    @pytest.mark.parametrize(
        ("uploads", "step"), [(None, 30), (Uploads(problem="x"), 30), (Uploads(bytes=9), None), (Uploads(9, 1, 2), 9)]
    )
    def test_checkpoint_is_the_uploaded_one_where_checkpoints_are_uploaded(
        self, uploads: Uploads | None, step: int | None
    ) -> None:
        checkpoint = build_checkpoint(GOOD, uploads)
        assert (checkpoint and checkpoint.step) == step

    def test_validation_is_kept_between_validations(self) -> None:
        shown = progress_of(RankProgress(step=1), Progress(val_accuracy="0.9", val_loss="0.3"))
        assert (shown.val_accuracy, shown.val_loss) == ("0.9", "0.3")

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.123456, "0.1235"), (12345.6, "12346"), (0.0, "0"), (-1.5, "-1.5"), (1e-9, "1e-09"),
            (1e300, "1000000000000000"), (-1e300, "-1000000000000000"),
        ],
    )  # fmt: skip
    def test_numbers_are_short_and_honest(self, value: float, text: str) -> None:
        assert progress_of(RankProgress(loss=value)).loss == text
        assert progress_of(RankProgress(step=5.0, lost_loss_step=3.0)).loss == "nan"

    @pytest.mark.parametrize(("seconds", "known"), [(-1, False), (0, False), (1, True), (3.9e9, True), (4e9, False)])
    def test_last_step_was_at_time_that_can_be(self, seconds: float, known: bool) -> None:
        assert (progress_of(RankProgress(step=5, last_step_time=seconds)).last_step_time is not None) == known

    @pytest.mark.parametrize("epoch", [1e15, -1e15, 1.5e15])
    def test_whole_numbers_are_those_that_every_reader_keeps(self, epoch: float) -> None:
        assert progress_of(RankProgress(step=5, epoch=epoch)).epoch == (int(epoch) if abs(epoch) <= 1e15 else None)


def test_restarts_of_replaced_pod_are_counted_beside_its_successor() -> None:
    report = last_words("UserError", restarts=1)
    replaced = child_pod(0, "Failed", code=130, message=report, suffix="first", age=60)
    pods = Pods(map(view_pod, (replaced, child_pod(0))))
    assert record_final_progress(Status(), pods, NOW).counts.in_place == 1


@pytest.mark.parametrize(("step", "total", "percent"), [(61, 400, "15.2%"), (401, None, None)])
def test_total_reported_while_running_is_kept_at_end_unless_step_exceeds_it(
    step: int, total: int | None, percent: str | None
) -> None:
    report = last_words("UserError", progress={"step": step})
    pods = Pods([view_pod(child_pod(1, "Failed", code=1, message=report))])
    status = Status(progress=Progress(step=60, total_steps=400, percent="15.0%"))
    progress = present(record_final_progress(status, pods, NOW).progress)
    assert (progress.step, progress.total_steps, progress.percent) == (step, total, percent)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([(0, None)], "fetching inputs: 0 bytes"),
        ([(120_000_000, 200_000_000)], "fetching inputs: 120 MB of 200 MB"),
        ([(1_500, 2_000_000_000_000)], "fetching inputs: 1.5 kB of 2000 GB"),
        ([(5, 5), (1, None)], "fetching inputs: 6 bytes, 1/2 complete"),
    ],
)
def test_progress_message_has_sizes_and_counts(sizes: list[tuple[int, int | None]], words: str) -> None:
    inputs = [
        InputStatus(name="a", phase="Fetched" if here == total else "Fetching", bytes=here, total_bytes=total)
        for here, total in sizes
    ]
    assert describe_inputs(inputs) == words
    expected = replace(inputs[-1], message="no route")
    assert describe_inputs([*inputs[:-1], expected]) == f"{words}; input a: no route"
