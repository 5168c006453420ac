"""The orders, the progress and the ends of the runs of `ddp check`, without a run."""

from __future__ import annotations

import json
import os
import random
import zipfile
from pathlib import Path

import pytest
import yaml

from ddp_cli.features.check.judge import judge
from ddp_cli.features.check.recordings import read_idle, read_recording
from ddp_cli.features.check.runs import (
    CheckedRun,
    Request,
    Runs,
    choose_kills,
    choose_mark,
    find_run_obstacle,
    find_torn,
    has_completed_early,
    move_python_path,
    read_last_lines,
    remove_saves,
)
from ddp_cli.features.check.verdict import FAILED, NOT_APPLICABLE
from ddp_cli.features.check.watch import Watch
from ddp_pod.contract.records import to_json
from ddp_pod.features.check.contract import (
    COMPLETED,
    ERROR,
    IDLE_SUFFIX,
    LIMIT,
    EndRecord,
    IdleRecord,
    LoaderRecord,
    RecordingOrder,
    SaveRecord,
    StartRecord,
    StepRecord,
)

SEEDS = range(200)


def saves(*steps: int) -> list[SaveRecord]:
    return [SaveRecord(path="last.pt", step=step) for step in steps]


@pytest.mark.parametrize(
    ("saved", "steps"),
    [((6, 12, 18), 20), (tuple(range(1, 21)), 20), ((18,), 20), ((6, 12), 12), ((0, 10), 20), ((1,), 6)],
)
def test_kills_follow_first_save_and_leave_steps_to_compare(saved: tuple[int, ...], steps: int) -> None:
    kills = [choose_kills(saves(*saved), steps, 2, random.Random(seed)) for seed in SEEDS]
    assert {kill.rank for kill, _ in kills} == {0, 1}
    for first, second in kills:
        assert min(step for step in saved if step) < first.step < steps
        assert second.rank is None
        resumed = max(step for step in saved if step <= first.step)
        assert second.step >= 1
        assert max(step for step in saved if step < resumed + second.step or step == resumed) <= steps - 2


def test_all_ranks_are_killed_after_the_last_save_in_time() -> None:
    for seed in SEEDS:
        first, second = choose_kills(saves(6, 12, 18), 20, 2, random.Random(seed))
        resumed = max(step for step in (6, 12, 18) if step <= first.step)
        assert 12 < resumed + second.step <= 18


@pytest.mark.parametrize(("saved", "steps"), [((), 20), ((0,), 20), ((19,), 20), ((20,), 20), ((12,), 12)])
def test_no_kill_without_a_save_in_time(saved: tuple[int, ...], steps: int) -> None:
    assert choose_kills(saves(*saved), steps, 2, random.Random(0)) == ()


@pytest.mark.parametrize(
    ("saved", "steps", "marks"), [((), 20, range(10, 19)), ((12,), 14, range(7, 13)), ((), 1, [1])]
)
def test_mark_is_in_second_half_without_a_regular_save_soon_after(
    saved: tuple[int, ...], steps: int, marks: range
) -> None:
    chosen = {choose_mark(saves(*saved), steps, random.Random(seed)) for seed in SEEDS}
    assert chosen == set(marks) - {step for save in saved for step in (save - 1, save)}
    assert choose_mark(saves(*range(steps)), steps, random.Random(0)) in marks


@pytest.mark.parametrize(
    ("reasons", "steps", "completed"),
    [
        ((COMPLETED, COMPLETED), 3, True),
        ((COMPLETED, COMPLETED), 2, False),
        ((COMPLETED, ERROR), 3, False),
        ((LIMIT, LIMIT), 3, False),
        ((COMPLETED, None), 3, False),
    ],
)
def test_run_has_completed_early_if_all_ranks_exit_with_0_before_the_last_step(
    tmp_path: Path, reasons: tuple[str | None, ...], steps: int, completed: bool
) -> None:
    for rank, reason in enumerate(reasons):
        records = [StartRecord(), StepRecord(step=1), StepRecord(step=2)]
        ends = [EndRecord(reason=reason)] if reason else []
        write(tmp_path, f"{rank}.0.jsonl", *records, *ends)
    assert has_completed_early(read_recording(tmp_path), steps) is completed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(folder: Path, name: str, *records: object) -> None:
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(to_json(record)) + "\n" for record in records)


def test_watch_counts_complete_lines_of_all_ranks(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    write(tmp_path, "0.0.jsonl", StartRecord(), StepRecord(step=1), SaveRecord(path="a.pt", step=1), StepRecord(step=2))
    write(tmp_path, "1.0.jsonl", StartRecord(), StepRecord(step=1))
    with (tmp_path / "1.0.jsonl").open("a") as file:
        file.write('no JSON\n{"event": "st')
    watch.read()
    watch.read()
    assert (watch.steps, watch.ranks) == (1, 2)
    assert watch.saves == [SaveRecord(path="a.pt", step=1)]

    with (tmp_path / "1.0.jsonl").open("a") as file:
        file.write('ep", "step": 2}\n')
    watch.read()
    assert watch.steps == 2


@pytest.mark.parametrize(
    ("waits", "quiet", "stalled"),
    [
        ([], 179, False),
        ([], 181, True),
        (None, 59, False),
        (None, 61, True),
        ([1, 1], 44, False),
        ([1, 1], 46, True),
        ([90, 1], 46, True),
        ([1, 40], 79, False),
        ([1, 40], 81, True),
    ],
)
def test_run_is_stalled_after_seconds_without_a_record(
    tmp_path: Path, waits: list[int] | None, quiet: int, stalled: bool
) -> None:
    clock = Clock()
    watch = Watch(tmp_path, clock)
    watch.waits = waits is None  # for the process group
    for wait in waits or ():
        clock.now += wait
        write(tmp_path, "0.0.jsonl", StepRecord())
        watch.read()
    clock.now += quiet
    assert bool(watch.find_stall()) is stalled


def test_restart_may_take_as_long_as_the_start(tmp_path: Path) -> None:
    clock = Clock()
    watch = Watch(tmp_path, clock, restarts=True)
    for record in (StartRecord(), StepRecord()):
        clock.now += 30
        write(tmp_path, "0.0.jsonl", record)
        watch.read()
    clock.now += 119
    assert not watch.find_stall()
    clock.now += 2
    assert watch.find_stall()


def test_saves_outside_of_the_copy_are_removed_only_if_the_run_made_them(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    names = (
        "copy/last.pt",
        "out/new.pt",
        "out/old.pt",
        "sharded/a.distcp",
        "sharded/.metadata",
        "mixed/a.distcp",
        "mixed/b",
    )
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    began = (tmp_path / "out/old.pt").stat().st_ctime + 0.001
    later = [path for path in names if path != "out/old.pt"]
    for name in later:
        os.utime(tmp_path / name)
        while (tmp_path / name).stat().st_ctime <= began:
            os.utime(tmp_path / name)
    paths = [
        copy / "last.pt",
        *(tmp_path / name for name in ("out/new.pt", "out/old.pt", "sharded", "mixed", "absent")),
    ]
    remove_saves([SaveRecord(path=str(path)) for path in paths], copy, began)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"copy/last.pt", "out/old.pt", "mixed/b"}
    assert not (tmp_path / "sharded").exists()


@pytest.mark.parametrize(
    ("files", "torn"),
    [
        ({"last.pt": 1.0}, ""),
        ({"last.pt": 0.5}, "last.pt"),
        ({"last.pt": 0.0}, "last.pt"),
        ({"last.pt": 1.0, "last.pt.new": 0.5}, ""),
        ({"epoch_1.pt": 1.0, "epoch_2.pt": 0.5}, "epoch_2.pt"),
    ],
)
def test_torn_checkpoint_is_found_unless_its_name_is_temporary(
    tmp_path: Path, files: dict[str, float], torn: str
) -> None:
    for name, part in files.items():
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data", b"weights")
        content = path.read_bytes()
        path.write_bytes(content[: int(part * len(content))])
    (tmp_path / "state.npz").write_bytes(b"no archive")
    names = [*files, "state.npz", "removed.pt"]
    assert find_torn([SaveRecord(path=str(tmp_path / name)) for name in names]) == torn


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([("TrainsAsOne", "False", "rank 0 waits")], "rank 0 waits"),
        ([("TrainsAsOne", "True", ""), ("Progressing", "False", "rank 1 is in load")], "rank 1 is in load"),
        ([("Scheduled", "False", "no port")], None),
        ([], None),
        (None, None),
    ],
)
def test_obstacle_of_a_run_is_what_its_launchers_report(
    tmp_path: Path, conditions: list[tuple[str, str, str]] | None, message: str | None
) -> None:
    if conditions is not None:
        rows = [
            {
                "type": kind,
                "status": status,
                "reason": "R",
                "message": text,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for kind, status, text in conditions
        ]
        (tmp_path / "train-1").mkdir()
        status = {"metadata": {"name": "train"}, "spec": {}, "status": {"phase": "Running", "conditions": rows}}
        (tmp_path / "train-1" / "status.yaml").write_text(yaml.safe_dump(status))
    obstacle = find_run_obstacle(tmp_path)
    assert (obstacle.message if obstacle is not None else None) == message


def test_python_path_in_the_folder_names_the_copy_if_it_has_the_entry(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (tmp_path / "copy/src").mkdir(parents=True)
    before = {"PYTHONPATH": f"{folder}/src:/elsewhere:{folder}/.venv/lib", "A": "1"}
    after = move_python_path(before, folder, tmp_path / "copy")
    assert after == {"PYTHONPATH": f"{tmp_path}/copy/src:/elsewhere:{folder}/.venv/lib", "A": "1"}
    assert move_python_path({"A": "1"}, folder, tmp_path) == {"A": "1"}


@pytest.mark.parametrize(("code", "state"), [(0, FAILED), (1, NOT_APPLICABLE)])
def test_end_and_resume_of_failed_reference_are_not_judged(tmp_path: Path, code: int, state: str) -> None:
    for rank in range(2):
        loaders = [LoaderRecord(iteration=iteration) for iteration in range(1, 5)]
        step = StepRecord(step=1, group_size=2, group_rank=rank)
        write(tmp_path, f"{rank}.0.jsonl", StartRecord(rank=rank, world_size=2), *loaders, step)
    run = CheckedRun("reference", RecordingOrder(), tmp_path, code, 1.0, "", 1, 2, ())
    verdicts = {verdict.check: verdict for verdict in judge([run])}
    assert len(verdicts) == 12
    assert verdicts["resumes exactly"].state == state
    assert verdicts["stops in time"].state == NOT_APPLICABLE


class PlannedRuns(Runs):
    """Runs without processes. ``steps``: of a run by what is left out of the copy, or by the batches of its epochs."""

    def __init__(self, folder: Path, steps: dict[object, int]) -> None:
        super().__init__(Request(folder=folder, options=[], arguments=[], steps=20, seed=0), lambda *_: None)
        self._steps = steps
        self.names: list[str] = []

    def _run_whole(self, name: str, batches: int) -> CheckedRun:
        self.names.append(name)
        steps = self._steps.get(batches if batches > 6 else tuple(self.left_out), 0)
        return CheckedRun(name, RecordingOrder(folder=str(self.scratch)), self.scratch, 0, 1.0, "", steps, 2, ())


@pytest.mark.parametrize(
    ("steps", "names", "left_out"),
    [
        ({(): 20}, ["reference"], ()),
        ({(): 2, ("b.pt",): 20}, ["reference", "reference-2"], ("b.pt",)),
        ({("b.pt", "a.pt"): 20}, ["reference", "reference-2", "reference-3"], ("b.pt", "a.pt")),
        ({("b.pt",): 4, ("b.pt", "a.pt"): 20}, ["reference", "reference-2", "reference-3"], ("b.pt", "a.pt")),
        ({("b.pt",): 4, ("b.pt", "a.pt"): 4}, ["reference", "reference-2", "reference-3"], ("b.pt",)),
        ({48: 20}, ["reference", "reference-2", "reference-3", "reference-48"], ()),
        ({(): 2}, ["reference", "reference-2", "reference-3"], ()),
    ],
    ids=[
        "whole",
        "newest left out",
        "all left out",
        "older ones too",
        "few steps in all",
        "longer epochs",
        "short training",
    ],
)
def test_reference_with_few_steps_runs_without_earlier_trainings(
    tmp_path: Path, steps: dict[object, int], names: list[str], left_out: tuple[str, ...]
) -> None:
    for name, time in (("train.py", 1.0), ("a.pt", 2.0), ("b.pt", 3.0)):
        (tmp_path / name).write_bytes(b"\x80\x02.")
        os.utime(tmp_path / name, (time, time))
    with PlannedRuns(tmp_path, steps) as runs:
        run = runs._run_reference()
    assert (runs.names, tuple(runs.left_out)) == (names, left_out)
    assert run.steps == max(steps.values())


def test_run_without_a_step_has_the_last_lines_of_the_script(tmp_path: Path) -> None:
    logs = tmp_path / "train-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "attempt-1-pod-0.log").write_text("[launcher] preflight\n")
    lines = [f"line {number}" for number in range(9)]
    (logs / "attempt-1-pod-1.log").write_text("\n".join([*lines, "unable to locate 2 gpus", "", "[launcher] end"]))
    assert read_last_lines(tmp_path) == [*lines[-4:], "unable to locate 2 gpus"]
    assert read_last_lines(tmp_path / "absent") == []


def test_processes_without_a_step_record_what_they_read(tmp_path: Path) -> None:
    assert read_idle(tmp_path) is None
    for rank, record in enumerate((IdleRecord(opened=("a", "b")), IdleRecord(is_cut=True, opened=("a",)))):
        (tmp_path / f"{rank}.{IDLE_SUFFIX}").write_text(json.dumps(to_json(record)))
    (tmp_path / f"2.{IDLE_SUFFIX}").write_text("{")
    assert read_idle(tmp_path) == IdleRecord(is_cut=True, opened=("a", "b"))
