"""``spec.history``, and the place of the records that it names."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.rule_builders import require, require_folder_url
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SecretReference, Spec, SpecFields
from ddp_operator.manifests.template import check_url


class RecordPlace(SpecFields, frozen=True, kw_only=True):
    """Store a record of the ended job: spec, status, Events and the last lines of each rank (docs/monitoring.md)."""

    url: Annotated[
        str | None,
        Meta(
            description="Folder of the records of all jobs, such as s3://team/history, by fsspec in the job's "
            "image. Unset: the claim, folder or url of spec.checkpoint."
        ),
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(description="Credentials for the url, if the training container has none."),
    ] = None


class HistoryFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    history: RecordPlace | None = None


def find_place(spec: Spec) -> str:
    """Return the URL of the records, or their folder in the container; empty: neither is named."""
    history = FIELDS.read(spec).history
    if history is not None and history.url:
        return history.url
    return (spec.checkpoint.url or spec.checkpoint.path) if spec.checkpoint else ""


def name_place(spec: Spec) -> str:
    """Return the place of the records as the option --history names it."""
    claim = spec.checkpoint.claim_name if spec.checkpoint else None
    place = find_place(spec)
    return f"claim/{claim}" if claim and "://" not in place else place


def _check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check that the records outlive the pods, and that their URL has no password."""
    spec = job.spec
    history = FIELDS.read(spec).history
    if history is None:
        return
    yield from check_url("spec.history.url", history.url, "spec.history.secretRef")
    place = find_place(spec)
    if "://" in place or (spec.checkpoint and spec.checkpoint.claim_name):
        return
    names = {mount.get("name") for mount in find_mounts(trainer, place)}
    if any(volume["name"] in names and "emptyDir" not in volume for volume in pod.get("volumes") or ()):
        return
    yield FieldError(
        "spec.history", "needs a place that outlives the pods; set history.url, checkpoint.url or checkpoint.claimName"
    )


FIELDS: Final = OwnFields(
    "history",
    HistoryFields,
    rules=(
        require_folder_url("spec.history.url"),
        require("history.secretRef", "has(self.history.url)", "needs history.url; set it or remove this field"),
    ),
    fixed_once="ended",
    check=_check,
    has_default=True,
)


def find_mounts(trainer: Mapping[str, Any], folder: str) -> list[dict[str, Any]]:
    """Return the container's mounts at a folder."""
    mounts = trainer.get("volumeMounts") or ()
    return [dict(mount) for mount in mounts if str(mount.get("mountPath")).rstrip("/") == folder.rstrip("/")]
