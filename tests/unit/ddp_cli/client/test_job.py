"""A job of a `Client`: its values, its waits, and its changes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import ddp_cli
from ddp_cli import Conflict, Job, NotFound, TrainingFailed
from ddp_cli.client.logs import Line
from ddp_operator.api import other_kinds
from ddp_operator.api.kubeobjects import format_time
from tests.support.builders import NOW
from tests.support.fake_backend import FakeBackend

TRACEBACK = "Traceback (most recent call last):\n  File \"train.py\", line 7, in train\nKeyError: 'lr'\n"
FAILURE = {"attempt": 1, "rank": 3, "category": "UserError", "message": "KeyError: 'lr'", "traceback": TRACEBACK}


def make(*statuses: dict[str, Any], lines: tuple[Line, ...] = ()) -> Job:
    metadata = {"name": "x", "namespace": "ml", "creationTimestamp": format_time(NOW)}
    resource = {"metadata": metadata, "spec": {"nodes": 2}, "status": statuses[0] if statuses else {}}
    return Job(FakeBackend(resource, *statuses, lines=lines), "x", resource)


def test_importing_package_loads_nothing_before_use() -> None:
    code = (
        "import sys; before = set(sys.modules); import ddp_cli; "
        "assert {name for name in sys.modules if name.startswith(('ddp_cli.', 'ddp_operator'))} == set(); "
        "assert {'asyncio', 'kubernetes', 'msgspec', 'torch', 'yaml'} & (set(sys.modules) - before) == set(); "
        "ddp_cli.Client(); assert {'kubernetes', 'torch', 'rich'} & set(sys.modules) == set()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_package_exports_exactly_documented_names() -> None:
    for name in ddp_cli.__all__:
        assert getattr(ddp_cli, name).__name__ == name
    assert set(ddp_cli.__all__) <= set(dir(ddp_cli))
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = ddp_cli.Trainer


def test_waiting_ends_with_last_status() -> None:
    job = make({"phase": "Running"}, {"phase": "Succeeded", "progress": {"step": 7}})
    status = job.wait()
    assert (status.phase, status.progress and status.progress.step) == ("Succeeded", 7)
    assert (job.phase, job.progress.step, repr(job)) == ("Succeeded", 7, "<Job x: Succeeded>")


def test_failed_job_raises_error_of_rank() -> None:
    with pytest.raises(TrainingFailed, match="KeyError: 'lr'") as raised:
        make({"phase": "Running"}, {"phase": "Failed", "lastFailure": FAILURE}).wait()
    error = raised.value
    assert (error.category, error.rank, error.traceback) == ("UserError", 3, TRACEBACK)
    assert str(error).endswith(TRACEBACK.rstrip())


def test_ended_job_is_not_changed() -> None:
    job = make({"phase": "Running"})
    job.scale(4)
    job.suspend()
    assert job.resource["spec"] == {"nodes": 4, "suspend": True}
    job.resume()
    assert job.resource["spec"]["suspend"] is False
    job = make({"phase": "Succeeded"})
    with pytest.raises(Conflict, match="has ended"):
        job.resume()
    job.delete(wait=True)
    with pytest.raises(NotFound):
        _ = job.status


def test_lines_are_of_all_ranks_or_of_one() -> None:
    job = make(lines=(Line("1", "rank 0", "a"), Line("2", "rank 1", "b"), Line("3", "ranks 0-1", "c")))
    assert list(job.logs()) == ["[rank 0] a", "[rank 1] b", "[ranks 0-1] c"]
    assert list(job.logs(rank=1)) == ["b"]
    with pytest.raises(NotFound, match="ddp why x"):
        list(make().logs())


@pytest.mark.parametrize(("phase", "is_refused"), [("Running", True), ("Succeeded", False)])
def test_logs_of_job_in_worker_cluster_name_that_cluster(phase: str, is_refused: bool) -> None:
    job = make({"phase": phase}, lines=(Line("t", "rank 0", "a"),))
    job.resource["spec"]["managedBy"] = other_kinds.MULTIKUEUE
    job.resource["metadata"]["annotations"] = {other_kinds.ANNOTATION_CLUSTER: "east"}
    if is_refused:
        with pytest.raises(Conflict, match=r"pods of x are in cluster east \(MultiKueue\).* --context NAME"):
            list(job.logs())
    else:
        assert list(job.logs()) == ["[rank 0] a"]
