"""The condition CheckpointsUploaded: whether the copies of checkpoints reach ``checkpoint.url``."""

from typing import Final

from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, is_finished
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.report import build_checkpoint
from ddp_operator.decide.state import Remark, State
from ddp_pod.contract.progress import Uploads

SNAPSHOT_UPLOADED: Final = "SnapshotUploaded"
UPLOAD_FAILING: Final = "UploadFailing"


def review(state: State) -> Remark | None:
    """Return CheckpointsUploaded by pod 0's page; None: it does not change."""
    page = state.observation.page
    checkpoint = state.spec.checkpoint
    if page is None or checkpoint is None or checkpoint.url is None or is_finished(state.status):
        return None

    saved = build_checkpoint(page.progress, page.uploads) or state.status.checkpoint
    newest = f"newest snapshot: step {saved.step}" if saved else "no snapshot is known"
    uploads = page.uploads or Uploads()
    if uploads.problem:
        message = f"upload to {checkpoint.url} fails: {uploads.problem}; {newest}"
        return Remark(Fact(c.UPLOADED, "False", UPLOAD_FAILING, message))
    if uploads.time is not None:
        message = f"checkpoints are uploaded to {checkpoint.url}; {newest}"
        return Remark(Fact(c.UPLOADED, "True", SNAPSHOT_UPLOADED, message))
    return None


FEATURE: Final = Feature("mirror", maturity="stable", page="checkpoints.md", review=review)
