"""Kueue's fields of a Job."""

from __future__ import annotations

import pytest

from ddp_operator.decide.state import DeleteJob, RelabelJob
from tests.support.builders import child_job
from tests.unit.ddp_operator.decide.test_decide import run

QUEUED = {"kueue.x-k8s.io/queue-name": "q"}


class TestKueue:
    """Only Kueue changes suspend, parallelism and node selectors of a queued Job."""

    @pytest.mark.parametrize("is_so", [True, False])
    def test_suspension_removes_job_from_queue(self, is_so: bool) -> None:
        actions = run(jobs=[child_job(suspend=is_so, queue="q")], suspend=True, labels=QUEUED).actions
        assert actions == (DeleteJob("train-1", "job-1"),)

    def test_queue_fields_may_change_while_job_waits(self) -> None:
        second = {"kueue.x-k8s.io/queue-name": "other", "kueue.x-k8s.io/priority-class": "high", "team": "a"}
        waiting = child_job(suspend=True, written=False, queue="q")
        (action,) = run(jobs=[waiting], labels=second, annotations={"kueue.x-k8s.io/elastic-job": "true"}).actions
        changed = {"kueue.x-k8s.io/queue-name": "other", "kueue.x-k8s.io/priority-class": "high"}
        annotations = {"kueue.x-k8s.io/elastic-job": "true"}
        assert action == RelabelJob("train-1", {"labels": changed, "annotations": annotations})
        assert run(jobs=[waiting], labels=QUEUED).actions == ()
        assert run(jobs=[waiting]).actions == (), "the label may be of Kueue's own, in a namespace with a default queue"
        admitted = child_job(queue="q", written=False, suspend=False)
        assert run(jobs=[admitted], labels=second).actions == (), "Kueue refuses it"
