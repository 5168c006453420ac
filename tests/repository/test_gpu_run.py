"""The program that runs the checks on a GPU: limits, order, and a table of what was measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.bench.trainer.systems import SYSTEMS
from tests.gpu.plan import SYSTEMS as MEASURED
from tests.gpu.runner import Runner, Step, collect_results, main, plan_stages
from tests.gpu.table import build_table
from tests.support import PATIENCE, ROOT


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_failing_and_hanging_steps_end_and_next_stage_runs(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hang = f"setsid sleep 600 & echo $! > {pid}; sleep 600"
    stages = [
        [Step("fails", ["bash", "-c", "echo no such thing; exit 3"], 60), Step("hangs", ["bash", "-c", hang], 2)],
        [Step("passes", ["true"], 60)],
    ]
    runner = Runner(tmp_path, 200, workers=2)
    reported: list[int] = []
    runner.run(stages, lambda: reported.append(len(runner.ends)))
    ends = {end.name: end for end in runner.ends}
    assert {name: end.state for name, end in ends.items()} == {
        "fails": "failed", "hangs": "timeout", "passes": "passed",
    }  # fmt: skip
    assert ends["fails"].problem == "exit code 3: no such thing"
    assert reported == [2, 3]
    deadline = time.monotonic() + PATIENCE
    while is_running(int(pid.read_text())):  # in a session of its own
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_step_starts_after_limit_of_run(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 2, workers=1)
    runner.run([[Step("hangs", ["sleep", "600"], 60)], [Step("late", ["true"], 60)]], lambda: None)
    assert [(end.name, end.state) for end in runner.ends] == [("hangs", "timeout"), ("late", "not started")]


def test_stopped_run_starts_no_further_step(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 60, workers=1)
    runner.run([[Step("first", ["true"], 60)], [Step("second", ["true"], 60)]], runner.stop)
    assert [(end.name, end.state) for end in runner.ends] == [("first", "passed"), ("second", "not started")]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plan_measures_each_preset_and_runs_each_test_file(device: str, tmp_path: Path) -> None:
    names = [step.name for stage in plan_stages(device, True, tmp_path) for step in stage]
    assert len(names) == len(set(names))
    assert {system.preset for system in MEASURED} == {system.preset for system in SYSTEMS}
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {"card", "data", "costs", "floor", *files, *(system.name for system in MEASURED)} <= set(names)


def test_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "costs,nothing"])
    assert "unknown steps nothing" in capsys.readouterr().err


def test_results_of_killed_steps_are_left_out(tmp_path: Path) -> None:
    case = '<testcase name="{}" time="1.5">{}</testcase>'
    cases = [case.format("good", ""), case.format("bad", '<failure message="no">why</failure>')]
    (tmp_path / "test_a.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    (tmp_path / "test_b.xml").write_text("<testsuites>")
    (tmp_path / "card.json").write_text("{")
    (tmp_path / "cifar10-resnet18.json").write_text('{"precisions": {}}')
    assert collect_results(tmp_path) == {
        "card": {},
        "tests": [
            {"test": "test_a::good", "seconds": 1.5, "outcome": "passed"},
            {"test": "test_a::bad", "seconds": 1.5, "outcome": "failure", "message": "no", "details": "why"},
        ],
        "seeds": {"cifar10-resnet18": {"precisions": {}}},
        "floor": {},
        "costs": {},
    }


def test_table_states_what_was_not_measured() -> None:
    loops = {"documents": "documents", "ours": "ours:preset", "compiled": None, "bare": "bare:preset"}
    measured = {"images_per_second": 30.0, "rates": [30.0, 30.0]}
    results = {
        "documents": {**measured, "rates": [10.0, 15.0]},
        "ours:preset": measured,
        "bare:preset": {"failed": "no"},
    }
    seeds = {"cifar10-resnet18": {"precisions": {"bf16": {"loops": loops, "results": results}}}}
    summary = {"device": "cuda", "card": {}, "steps": []}
    text = "\n".join(build_table(summary, [{"test": "a::b", "outcome": "failure"}], seeds, {}, {}))
    assert "1 failure\n  failure: a::b" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("cifar10-resnet18")]
    assert row == ["cifar10-resnet18", "bf16", "30", "30", "-", "-", "2.5", "-", "-"]
    assert "floor of ResNet-18: -\ncosts: -" in text
