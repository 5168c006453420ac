"""Build the Job that stores the record of an ended job.

Its pod has the image and the user of the training pods, and no GPU. For a folder it mounts only that folder: a job that
never started may lack any other volume or variable. For a URL it has the variables and volumes of the training pods,
which may have the credentials.
"""

from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import find_limits
from ddp_operator.api.record import name_record
from ddp_operator.decide.hooks import feature_job_name
from ddp_operator.features.history.fields import FIELDS, find_mounts, find_place
from ddp_operator.manifests.children import build_metadata, load_launcher
from ddp_operator.manifests.pod import build_checkpoint_volume
from ddp_operator.manifests.small_pods import (
    build_small_job_spec,
    build_small_pod,
    build_small_resources,
    finish_small_pod,
    keep_zone_selectors,
)
from ddp_operator.manifests.template import ResolvedTemplate, resolve_template

_REQUESTS: Final = {"cpu": "100m", "memory": "128Mi"}
_STORE_SECONDS: Final = 600  # for a record, including the start of the pod


def build_history_job(job: DDPTrainingJob, record: str, image: str) -> dict[str, Any]:
    """Return the Job that stores the record of an ended job. It bypasses Kueue: it requests no scarce resources.

    ``image``: for a job of which no pod has run, so that its own image may not exist; empty: use that. Raises:
    InvalidManifest.
    """
    own_image = "" if job.status.first_run_time is not None else image
    template = _build_template(job, resolve_template(job), record, own_image)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": build_metadata(job, feature_job_name(job.name, FIELDS.feature), attempt=0),
        "spec": build_small_job_spec(template, 1) | {"activeDeadlineSeconds": _STORE_SECONDS},
    }


def _build_template(job: DDPTrainingJob, template: ResolvedTemplate, record: str, image: str) -> dict[str, Any]:
    """Return ``Job.spec.template``. ``image``: instead of the job's, if not empty."""
    launcher = f"{constants.LAUNCHER_MOUNT_PATH}/{constants.LAUNCHER_FILE}"
    interpreter = "python3" if image else template.interpreter
    pod = _build_pod(job, template.pod, template.trainer["name"], [interpreter, launcher, "history", record])
    if image:
        pod["containers"][0] |= {"image": image}
    return finish_small_pod(pod, job, load_launcher().digest)


def _build_pod(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: str, command: list[str]) -> dict[str, Any]:
    """Return the spec of the pod, from the template's ``pod``, without the fields of all pods."""
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
        owners = (spec.checkpoint, FIELDS.read(spec).history)
        secrets = [owner.secret_ref.name for owner in owners if owner is not None and owner.secret_ref is not None]
        container["envFrom"] = [*(container.get("envFrom") or ()), *({"secretRef": {"name": name}} for name in secrets)]
    else:
        container["env"] = []
        container["envFrom"] = []
        mounts = find_mounts(container, place)
        volumes = [volume for volume in volumes if volume["name"] in {mount["name"] for mount in mounts}]
        if not mounts:
            assert spec.checkpoint is not None
            volume, mount = build_checkpoint_volume(spec.checkpoint)
            volumes.append(volume)
            mounts.append(mount)
    container["volumeMounts"] = mounts
    kept["volumes"] = volumes
    return kept
