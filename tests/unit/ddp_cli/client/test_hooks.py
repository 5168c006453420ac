"""What features add to a job: reports, and its former runs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from ddp_cli.client import hooks
from ddp_cli.client.errors import ClientError
from ddp_cli.client.hooks import CommandFeature, list_former_runs
from ddp_cli.client.job import Job
from ddp_cli.client.notebook import Report
from tests.support.builders import resource
from tests.support.fake_backend import FakeBackend


@pytest.fixture
def job() -> Job:
    job = resource("x") | {"status": {"phase": "Running"}}
    return Job(FakeBackend(job), "x", job)  # type: ignore[arg-type]


def use(monkeypatch: pytest.MonkeyPatch, module: str, functions: dict[str, Any], **hook: str) -> None:
    """Use one feature, whose module has these functions."""
    made = ModuleType(module)
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.setattr(hooks, "_used", (CommandFeature(name="x", maturity="beta", page="x.md", **hook),))


def test_report_is_that_of_the_feature_which_draws_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"build_job_report": lambda job, prometheus, run: f"<h1>{job.name} {prometheus} {run}</h1>"}
    use(monkeypatch, "drawing", functions, reports="drawing")
    report = job.report("http://p", run=3)
    assert isinstance(report, Report)
    assert str(report) == "<h1>x http://p 3</h1>"


def test_report_without_such_a_feature_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_used", ())
    with pytest.raises(ClientError, match="no feature that draws reports; `ddp why`"):
        job.report()


def test_former_runs_are_those_of_features_that_keep_any(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_used", ())
    assert list_former_runs(job) == []
    use(monkeypatch, "keeping", {"list_former_runs": lambda job: [job.name]}, former_runs="keeping")
    assert list_former_runs(job) == ["x"]
