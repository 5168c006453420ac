"""What the comparison of runs states at a glance."""

from __future__ import annotations

from ddp_cli.features.ui.compare import Result, join_curves, list_results, render_comparison
from ddp_cli.features.ui.job_page import JobPage
from ddp_cli.features.ui.run import RecordedRun
from ddp_operator.api.parse import parse_status
from tests.support.builders import NOW, resource
from tests.unit.ddp_cli.features.ui.test_rows import condition

SUCCEEDED = ("c", 100, 2.0, 60.0, "Succeeded")


def make(name: str, steps: int, loss: float, rate: float, phase: str = "Running") -> JobPage:
    conditions = [condition("Accepted", "True", "Valid"), condition("Progressing", "True", "Training")]
    job = resource() | {"status": {"phase": phase, "nodes": {"desired": 2}, "conditions": conditions}}
    rows = [
        {"time": 1e9 + step, "step": float(step), "loss": loss + 100 / step, "samples_per_second": rate}
        for step in range(1, steps + 1)
    ]
    return JobPage(RecordedRun(job, parse_status(job), rows, (), name=name, under_way=True), NOW)


def read(*runs: JobPage) -> dict[str, Result]:
    return {result.name: result for result in list_results(runs)}


def test_losses_are_compared_at_the_steps_that_all_runs_have() -> None:
    results = read(make("long", 1000, 1.0, 50.0, "Succeeded"), make("short", 100, 1.0, 50.1))
    assert results["training loss, mean of steps 90 to 100"].verdict == "equal within 2%"
    assert results["nodes"].values == ["2", "0 of 2"]


def test_better_run_is_named_with_its_lead_over_the_next() -> None:
    runs = [make("a", 100, 3.0, 40.0), make("b", 100, 1.0, 50.0), make("c", 100, 2.0, 60.0)]
    results = read(*runs)
    assert results["training loss, mean of steps 90 to 100"].verdict == "b is better by 33%"
    assert results["mean throughput, samples/s"].verdict == "c is better by 20%"


def test_equal_runs_are_named_beside_a_worse_one() -> None:
    results = read(make("a", 100, 3.0, 50.0), make("b", 100, 3.0, 50.1), make("c", 100, 3.0, 20.0))
    assert results["mean throughput, samples/s"].verdict == "b and a are better, and equal within 2%"
    assert results["training loss, mean of steps 90 to 100"].verdict == "equal within 2%"


def test_run_without_steps_leaves_no_verdict() -> None:
    results = read(make("a", 100, 3.0, 40.0), make("b", 0, 1.0, 50.0))
    assert not any(result.verdict for result in results.values())


def test_verdict_names_the_training_loss_and_the_runs_that_are_unfinished() -> None:
    runs = [make(*values) for values in (("a", 100, 3.0, 40.0), ("b", 100, 1.0, 50.0, "Failed"), SUCCEEDED)]
    page = render_comparison(runs)
    assert "<b>Training loss, mean of steps 90 to 100:</b> b is better by 33% (a 4.054, b 2.054, c 3.054)</li>" in page
    assert "<b>Unfinished:</b> a still trains, b (Failed)</li>" in page
    assert "Unfinished" not in render_comparison([make(*SUCCEEDED)] * 2)


def test_throughput_is_compared_in_one_unit() -> None:
    samples = make("a", 100, 3.0, 40.0)
    steps = make("b", 100, 3.0, 0.0)
    for number, page in enumerate((samples, steps), 1):
        page.run.rows = [{**row, "steps_per_second": 2.0 * number} for row in page.run.rows]
    assert read(samples, steps)["mean throughput, steps/s"].values == ["2", "4"]
    (chart,) = [chart for chart in join_curves([samples.run, steps.run])["charts"] if chart["id"] == "rate"]
    assert [line["parts"][0]["v"][0] for line in chart["lines"]] == [2.0, 4.0]
