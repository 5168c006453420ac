"""A failure after which torchrun restarts the workers: its way from the failing pod's page into the status."""

from typing import Any

from ddp_operator.api import constants
from tests.support.builders import NOW, last_words, page, respond
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")


class TestPublishedFailure:
    def page(self, counted: int, **words: Any) -> str:
        return page(step=9, steps=2, phase="Running", restarts=counted, answered=last_words(**words) if words else None)

    async def train(self, *pages: str) -> ReconcilerHarness:
        """Return a job that trains on as many pods with these pages."""
        harness = await ReconcilerHarness(nodes=len(pages)).train(TRAINING)

        async def read_report(pod: Any, port: int) -> bytes | None:
            return respond(pages[int(pod["metadata"]["annotations"][constants.ANNOTATION_COMPLETION_INDEX])])

        harness.cluster.read_report = read_report  # type: ignore[method-assign]
        harness.clock.advance(10)
        await harness.settle()
        return harness

    async def test_root_cause_replaces_symptom_of_same_incident_and_not_the_reverse(self) -> None:
        symptom = self.page(1, category="NCCL", secondary=True, restarts=1, time=NOW.timestamp() + 5)
        root = {"category": "UserError", "message": "KeyError: 10", "time": NOW.timestamp() + 2}
        joining = symptom.replace("Running", "Rendezvous")
        pages = [joining, self.page(1)]
        harness = await ReconcilerHarness(nodes=2).train(TRAINING)

        async def read_report(pod: Any, port: int) -> bytes | None:
            return respond(pages[int(pod["metadata"]["annotations"][constants.ANNOTATION_COMPLETION_INDEX])])

        harness.cluster.read_report = read_report  # type: ignore[method-assign]
        categories = []
        for pages[1] in (self.page(1), self.page(1, **root, restarts=1), self.page(1)):
            harness.clock.advance(11)
            await harness.settle()
            categories.append(present(harness.status.last_failure).category)
        assert categories == ["NCCL", "UserError", "UserError"]
        assert harness.status.counts.in_place == 0, "the workers have not joined again"

    async def test_restart_is_counted_and_reported_as_in_place(self) -> None:
        words = {"category": "UserError", "rank": 1, "message": "KeyError: 10", "step": 10}
        harness = await self.train(self.page(1), self.page(1, **words, restarts=1))
        restarts = harness.status.counts
        restart = harness.status.last_restart
        assert (restarts.used, restarts.counted, restarts.in_place, restarts.total, restarts.step) == (1, 1, 1, 0, 10)
        assert restart is not None
        assert (restart.level, restart.attempt, restart.step) == ("SamePods", 1, 10)
        reports = [event.message for event in harness.cluster.events if event.reason == "RestartedInPlace"]
        assert reports == ["restart 1 of 3, in the same pods: UserError (rank 1): KeyError: 10"]

    async def test_unobserved_restarts_are_counted_and_end_job_at_limit(self) -> None:
        for most, phase, used in ((2, "Running", 2), (4, "Failed", 0)):
            pages = [self.page(most, category="OOM", restarts=item) for item in range(1, most + 1)]
            harness = await self.train(*pages)
            assert (harness.status.phase, harness.status.counts.used) == (phase, used)
        assert harness.state("Failed") == ("True", "RestartBudgetExhausted")

    async def test_restart_without_root_cause_is_not_counted(self) -> None:
        harness = await self.train(self.page(1, category="NCCL", secondary=True, restarts=1), self.page(1))
        assert (harness.status.counts.used, harness.status.counts.in_place) == (0, 1)

    async def test_restarts_after_last_page_are_read_from_termination_messages(self) -> None:
        harness = await ReconcilerHarness(nodes=2).train(TRAINING)
        cause = last_words("UserError", rank=1, message="KeyError: 10", step=10, restarts=1)
        secondary = last_words("NCCL", secondary=True, restarts=1)
        for index, message in enumerate((secondary, cause)):
            harness.end_pod(index, message=last_words(restarts=1, lastFailure=message))
        await harness.settle()
        restarts = harness.status.counts
        restart = harness.status.last_restart
        assert (harness.status.phase, restarts.used, restarts.counted, restarts.in_place) == ("Succeeded", 1, 1, 1)
        assert restart is not None
        assert (restart.level, restart.attempt, restart.step) == ("SamePods", 1, 10)
        assert present(harness.status.last_failure).message == "KeyError: 10"
