"""Recovery seconds and lost steps from samples of a report."""

from __future__ import annotations

from ddp_cli.features.drill.recovery import MeasuredRecovery, Sample, measure

BEFORE = Sample(99.0, 1, step=40, steps_of_process=40, in_place_restarts=0)


def at(time: float, step: int | None, made: int | None, restarts: int | None = 0, attempt: int = 1) -> Sample:
    return Sample(time, attempt, step, made, restarts)


def test_in_place_recovery_resumes_from_difference_of_counters() -> None:
    samples = [at(100.1, 41, 41), at(101, 41, 41, 1), at(104, 30, 0, 1), at(105.5, 32, 2, 1)]
    result = measure(BEFORE, 100.0, samples)
    assert result == MeasuredRecovery(seconds=5.5, level="process", step_before=41, resumed_from=30)
    assert result.steps_lost == 11


def test_last_page_of_dead_process_is_no_recovery() -> None:
    """The launcher counts the restart at once, while the page still shows the dead worker's values."""
    assert measure(BEFORE, 100.0, [at(101, 41, 41, 1), at(102, 41, 41, 1)]) is None


def test_new_process_is_recognized_by_changed_difference() -> None:
    """A slow scrape: the new counter has overtaken the old one meanwhile."""
    early = Sample(99.0, 1, step=5, steps_of_process=5, in_place_restarts=0)
    result = measure(early, 100.0, [at(100.1, 5, 5, 1), at(101, 14, 6, 1)])
    assert result == MeasuredRecovery(seconds=1.0, level="process", step_before=5, resumed_from=8)


def test_new_process_from_step_0_is_recognized_by_advancing_counter() -> None:
    early = Sample(99.0, 1, step=5, steps_of_process=5, in_place_restarts=0)
    late_page = [at(100.1, 5, 5, 1), at(100.3, 6, 6, 1), at(100.5, 6, 6, 1)]
    assert measure(early, 100.0, late_page) is None
    result = measure(early, 100.0, [*late_page, at(101, 9, 9, 1)])
    assert result == MeasuredRecovery(seconds=1.0, level="process", step_before=6, resumed_from=0)


def test_lost_page_is_replaced_pod() -> None:
    samples = [at(101, None, None, None), at(108, None, None, 0), at(112, 41, 1, 0)]
    result = measure(BEFORE, 100.0, samples)
    assert result is not None
    assert (result.level, result.seconds, result.steps_lost) == ("pod", 12.0, 0)


def test_later_attempt_is_restart_of_group() -> None:
    result = measure(BEFORE, 100.0, [at(101, None, None, None), at(130, 21, 1, 0, attempt=2)])
    assert result is not None
    assert (result.level, result.resumed_from, result.steps_lost) == ("group", 20, 20)


def test_first_report_of_step_0_is_no_step_before_beginning() -> None:
    result = measure(BEFORE, 100.0, [at(101, 0, 1, 1)])
    assert result is not None
    assert (result.resumed_from, result.from_beginning, result.steps_lost) == (0, True, 40)


def test_script_without_steps_recovers_when_workers_run() -> None:
    silent = Sample(99.0, 1, None, None, 0, running=True)
    samples = [
        Sample(100.5, 1, None, None, 0, running=True),
        Sample(102, 1, None, None, 1),
        Sample(103, 1, None, None, 1, True),
    ]
    result = measure(silent, 100.0, samples)
    assert result == MeasuredRecovery(3.0, "process", None, None)
    assert result.steps_lost is None


def test_no_restart_is_no_recovery() -> None:
    assert measure(BEFORE, 100.0, [at(101, 41, 41), at(102, 42, 42)]) is None
