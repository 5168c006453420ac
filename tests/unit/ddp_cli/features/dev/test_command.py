"""`ddp dev` and `ddp rerun`: the YAML of the job, and the outcome of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.features.dev import former_runs
from ddp_cli.features.dev import session as dev_session
from ddp_cli.features.dev.command import add_dev
from ddp_cli.features.dev.orders import PodMissing
from ddp_cli.features.dev.session import Session, describe_outcome
from ddp_pod.contract.failure_record import Failure
from ddp_pod.features.dev.contract import Event
from tests.support.builders import resource


@pytest.mark.parametrize(
    ("spec", "hold", "expected"),
    [
        ({}, None, {}),
        ({}, 60, {"holdSeconds": 60}),
        ({"dev": {"holdSeconds": 90}}, None, {"holdSeconds": 90}),
        ({"dev": {"holdSeconds": 90}}, 60, {"holdSeconds": 60}),
    ],
)
def test_job_gets_spec_dev_and_keeps_that_of_its_file(spec: dict[str, Any], hold: int | None, expected: Any) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "spec": {}}
    job = resource(nodes=2, **spec)
    written = list(yaml.safe_load_all(add_dev(yaml.safe_dump_all([secret, job]), hold)))
    assert written == [secret, job | {"spec": {**job["spec"], "dev": expected}}]


FAILURE = Failure(category="UserError", rank=3, pod_index=1, exit_code=1, message="KeyError: 'x'", remedy="fix it")


@pytest.mark.parametrize(
    ("event", "facts"),
    [
        (Event("ended", run=3, result="Succeeded"), ["mine: run 3 succeeded after 1m05s"]),
        (Event("ended", run=3, result="Stopped"), ["run 3 was stopped"]),
        (Event("ended", run=3, result="Failed"), ["run 3 failed after 1m05s"]),
        (
            Event("ended", run=3, result="Failed", failure=FAILURE),
            ["run 3 failed", "UserError (rank 3, pod 1, exit code 1): KeyError: 'x'. Fix it."],
        ),
    ],
)
def test_outcome_has_result_cause_and_remedy(event: Event, facts: list[str]) -> None:
    outcome = describe_outcome("mine", event, 65.0)
    assert all(fact in outcome for fact in facts), outcome


@pytest.mark.parametrize(("open_runs", "is_cut"), [({"train-1-0": 3}, True), ({"train-1-0": 4}, False), ({}, False)])
def test_lines_that_come_too_late_are_named(
    open_runs: dict[str, int], is_cut: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev_session, "_SECONDS_FOR_LINES", 0.2)
    backend = SimpleNamespace(argument=lambda name: f"ddp-runs/{name}", logs=lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(dev_session, "DevLogs", lambda *_, **__: SimpleNamespace(open_runs=open_runs))
    session = Session(SimpleNamespace(name="mine", backend=backend, resource={}))  # type: ignore[arg-type]
    session._conclude(Event("ended", run=3, result="Succeeded"))
    assert ("ddp logs ddp-runs/mine" in capsys.readouterr().out) == is_cut


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dev job.yaml --max-restarts 0", "--max-restarts: only for runs on this machine; add --local"),
        ("dev job.yaml --python python3", "--python: only for runs on this machine; add --local"),
        ("dev job.yaml --local --code-claim c", "--code-claim: only for jobs in a cluster; leave out --local"),
        ("dev job.yaml --cpu", "--cpu: only for a script; remove the GPUs from job.yaml instead"),
        ("dev t.py --cpu --gpus 2", "--cpu requests no GPUs; leave out --gpus"),
    ],
)
def test_option_for_another_place_is_refused_with_remedy(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(resource()))
    Path("t.py").write_text("import torch")
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_former_runs_are_none_without_pod_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PodMissing("pod 0 does not run")

    monkeypatch.setattr(former_runs, "send_order", fail)
    assert former_runs.list_former_runs(SimpleNamespace()) == ()  # type: ignore[arg-type]
