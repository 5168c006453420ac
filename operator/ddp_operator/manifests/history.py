"""Build the pod that stores the record of an ended job, and check that the job names a place for it.

The pod has the image and the user of the training pods, and no GPU. For a folder it mounts only that folder: a job that
never started may lack any other volume or variable. For a URL it has the variables and volumes of the training pods,
which may have the credentials.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import find_limits
from ddp_operator.api.record import find_place, name_record
from ddp_operator.api.spec import Checkpoint, Spec
from ddp_operator.manifests.inputs import build_small_pod, build_small_resources, keep_zone_selectors

_REQUESTS: Final = {"cpu": "100m", "memory": "128Mi"}


def check_history(spec: Spec, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check that the records outlive the pods."""
    place = find_place(spec) if spec.history is not None else "://"
    if "://" in place or (spec.checkpoint and spec.checkpoint.claim_name):
        return
    names = {mount.get("name") for mount in _find_mount(trainer, place)}
    if any(volume["name"] in names and "emptyDir" not in volume for volume in pod.get("volumes") or ()):
        return
    yield FieldError(
        "spec.history", "needs a place that outlives the pods; set history.url, checkpoint.url or checkpoint.claimName"
    )


def build_checkpoint_volume(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the operator's volume at the checkpoint folder, and its mount."""
    claim = checkpoint.claim_name
    source = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    mount = {"name": constants.CHECKPOINT_VOLUME, "mountPath": checkpoint.path}
    return {"name": constants.CHECKPOINT_VOLUME, **source}, mount


def build_history_pod(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: str, command: list[str]) -> dict[str, Any]:
    """Return the spec of the pod, from the template's ``pod``. ``pod.py`` adds the fields of all pods."""
    spec = job.spec
    place = find_place(spec)
    kept = build_small_pod(job, pod, trainer)
    keep_zone_selectors(kept, pod)
    [container] = kept["containers"]
    container["command"] = [text.replace("$", "$$") for text in (*command, place, name_record(job))]
    container["resources"] = build_small_resources(find_limits(pod, container), _REQUESTS)
    mounts = list(container.get("volumeMounts") or ())
    volumes = list(kept.get("volumes") or ())
    if "://" in place:
        owners = (spec.checkpoint, spec.history)
        secrets = [owner.secret_ref.name for owner in owners if owner is not None and owner.secret_ref is not None]
        container["envFrom"] = [*(container.get("envFrom") or ()), *({"secretRef": {"name": name}} for name in secrets)]
    else:
        container["env"] = []
        container["envFrom"] = []
        mounts = _find_mount(container, place)
        volumes = [volume for volume in volumes if volume["name"] in {mount["name"] for mount in mounts}]
        if not mounts:
            assert spec.checkpoint is not None
            volume, mount = build_checkpoint_volume(spec.checkpoint)
            volumes.append(volume)
            mounts.append(mount)
    container["volumeMounts"] = mounts
    kept["volumes"] = volumes
    return kept


def _find_mount(trainer: Mapping[str, Any], folder: str) -> list[dict[str, Any]]:
    mounts = trainer.get("volumeMounts") or ()
    return [dict(mount) for mount in mounts if str(mount.get("mountPath")).rstrip("/") == folder.rstrip("/")]
