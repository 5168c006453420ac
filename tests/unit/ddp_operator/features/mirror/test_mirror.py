"""The condition of uploads to checkpoint.url."""

from __future__ import annotations

import msgspec

from ddp_cli.view.why import explain_why
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.state import Decision
from ddp_operator.features.mirror import FEATURE
from tests.support.builders import NOW, page, resource
from tests.support.decisions import RUNNING, STARTED, present, read_state, run_pass


class TestCheckpointsInAStore:
    STORE = {"path": "/ckpt", "url": "s3://bucket/digits"}
    NEWEST = {"bytes": 9, "step": 40, "time": 1.7e9}
    BEFORE = page(step=70, checkpoint_step=60, uploads={"bytes": 9}, phase="Running")
    UPLOADED = page(step=70, checkpoint_step=60, uploads=NEWEST, phase="Running")
    PROBLEM = {"problem": "OSError: 503 Slow Down"}
    FAILING = page(step=70, checkpoint_step=60, uploads=NEWEST | PROBLEM, phase="Running")

    def decide(self, text: str, status: Status = STARTED) -> Decision:
        return run_pass(*RUNNING, text=text, status=status, checkpoint=self.STORE, hooks=Hooks((FEATURE,)))

    def test_failing_upload_is_condition_with_its_message(self) -> None:
        decision = self.decide(self.FAILING)
        assert read_state(decision, c.UPLOADED) == ("False", "UploadFailing")
        result = present(decision.status.condition(c.UPLOADED))
        assert result.message == (
            "upload to s3://bucket/digits fails: OSError: 503 Slow Down; newest snapshot: step 40"
        )
        again = self.decide(self.UPLOADED, decision.status)
        assert read_state(again, c.UPLOADED) == ("True", "SnapshotUploaded")
        reasons = [event.reason for event in list_transition_events(STARTED, decision.status)]
        assert "UploadFailing" in reasons
        assert [event.reason for event in list_transition_events(decision.status, again.status)] == ["SnapshotUploaded"]

    def test_why_names_training_and_newest_snapshot(self) -> None:
        decision = self.decide(self.FAILING)
        item = resource("train") | {"status": msgspec.to_builtins(decision.status)}
        why = explain_why(item, (), NOW)
        assert why.reason == "UploadFailing"
        assert "503 Slow Down" in why.what
        assert "step 40" in why.what
