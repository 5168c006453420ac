"""``spec.inputs``, and the check that its rules cannot make."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from ddp_operator.api import constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.former import TEXT, FormerField, describe_members
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.schema import list_mounts
from ddp_operator.api.spec import SecretReference, SpecFields
from ddp_pod.contract.credentials import has_credentials

_MOST: Final = {"maxItems": 16}  # a termination message has room for the reports of as many
_LONGEST: Final = {"maxLength": 2048}
"""Bounds from which the API server estimates the cost of rules."""


class Input(SpecFields, frozen=True, kw_only=True):
    """Data or a model. A pod without GPUs fetches it before the training pods are created; they mount it read-only."""

    name: Annotated[
        str | None,
        Meta(description="Name in messages. Unset: the last part of the URL.", extra_json_schema=_LONGEST),
    ] = None
    url: Annotated[
        str,
        Meta(
            description="A file, or all files below a folder or prefix: https://, file://, or a scheme of fsspec: "
            "s3://, gs://, hf://, …",
            extra_json_schema=_LONGEST,
        ),
    ]
    mount_path: Annotated[
        str,
        Meta(
            description="Absolute path in the container: of the fetched folder, or of a folder with the file.",
            extra_json_schema=_LONGEST,
        ),
    ]
    claim_name: Annotated[
        str | None,
        Meta(
            description="PersistentVolumeClaim that stores the input; inputs and jobs may share it. Set either "
            "this or nodePath.",
            extra_json_schema=_LONGEST,
        ),
    ] = None
    node_path: Annotated[
        str | None,
        Meta(
            description="Folder on each node that stores the inputs of its jobs, such as /var/cache/ddp, on a disk "
            "with room for all. Nothing deletes files from it.",
            extra_json_schema=_LONGEST,
        ),
    ] = None
    checksum: Annotated[
        str | None,
        Meta(
            description="Of a single file: sha256: and 64 hexadecimal digits. The job fails if the file differs.",
            extra_json_schema=_LONGEST,
        ),
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(
            description="Secret whose keys become variables of the fetching pod, such as AWS_ACCESS_KEY_ID, "
            "HF_TOKEN, or HTTP_AUTHORIZATION (the header for https://)."
        ),
    ] = None

    @property
    def label(self) -> str:
        """The name of the input in messages."""
        return self.name or self.url.partition("?")[0].rstrip("/").rpartition("/")[2] or self.url

    @property
    def key(self) -> str:
        """The name of its folder in a claim or cache: equal for all jobs with the same URL and checksum."""
        readable = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-.")[:40]
        return f"{readable}-{hashlib.sha256(f'{self.url} {self.checksum}'.encode()).hexdigest()[:12]}"

    @property
    def place(self) -> str:
        """The location that stores it. Inputs with equal locations share their files."""
        where = f"node:{self.node_path.rstrip('/')}" if self.node_path is not None else f"claim:{self.claim_name}"
        return f"{where}/{constants.INPUTS_FOLDER}/{self.key}"


class InputFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    inputs: Annotated[
        tuple[Input, ...] | None,
        Meta(
            description="Data and models to fetch before the job requests GPUs, at most 16 (docs/your-code.md).",
            extra_json_schema=_MOST,
        ),
    ] = None


def _take_over_cache(cache: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"nodePath": cache["path"]} if isinstance(cache, Mapping) and "path" in cache else {}


FORMER: Final = FormerField(
    "inputs[].nodeCache",
    "write nodePath with the value of its path",
    describe_members(path={**TEXT, "pattern": "^/[^:]*[^/:]$"}),
    _take_over_cache,
)


def check_inputs(job: DDPTrainingJob, inputs: Sequence[Input], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check the rules for spec.inputs that are not in the CRD."""
    used_paths = _list_used_paths(job, trainer)
    labels: set[str] = set()
    for index, entry in enumerate(inputs):
        here = f"spec.inputs[{index}]"
        yield from _check_input(entry, here)
        path = entry.mount_path.rstrip("/")
        if not path.startswith("/") or "/../" in f"{path}/":
            yield FieldError(
                f"{here}.mountPath", "must be an absolute path other than /, such as /data", entry.mount_path
            )
        elif path in used_paths:
            message = f"is already used by {used_paths[path]}; choose another path"
            yield FieldError(f"{here}.mountPath", message, entry.mount_path)
        used_paths[path] = f"{here}.mountPath"
        if entry.label in labels:
            yield FieldError(f"{here}.name", "is the name of another input; set a unique name", entry.label)
        labels.add(entry.label)


def _list_used_paths(job: DDPTrainingJob, trainer: Mapping[str, Any]) -> dict[str, str]:
    """Return the mount paths of the training container, each with the field or component that uses it."""
    paths = {str(mount.get("mountPath")).rstrip("/"): "a volumeMount" for mount in trainer.get("volumeMounts") or ()}
    paths |= {constants.LAUNCHER_MOUNT_PATH: "the operator", "/dev/shm": "shared memory"}
    if job.spec.checkpoint:
        paths[job.spec.checkpoint.path.rstrip("/")] = "spec.checkpoint.path"
    return paths | list_mounts(job)


def _check_input(entry: Input, here: str) -> Iterator[FieldError]:
    """Check the fields of one input, except those that depend on other fields of the spec."""
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://.+", entry.url):
        yield FieldError(f"{here}.url", "must be a URL, such as https://host/file or s3://bucket/prefix", entry.url)
    elif has_credentials(entry.url):
        key = "HTTP_AUTHORIZATION" if entry.url.startswith("http") else "the plug-in's variables"
        yield FieldError(f"{here}.url", f"must not contain a password; put {key} into a Secret and set secretRef")
    if (entry.claim_name is None) == (entry.node_path is None):
        yield FieldError(here, "needs either claimName or nodePath to store it; set one of the two")
    if entry.node_path is not None and not re.fullmatch(r"/[^:]*[^/:]", entry.node_path):
        message = "must be an absolute path on the nodes, such as /var/cache/ddp"
        yield FieldError(f"{here}.nodePath", message, entry.node_path)
    if entry.checksum is not None and not re.fullmatch("sha256:[0-9a-f]{64}", entry.checksum):
        message = "must be sha256: and 64 hexadecimal digits in lower case, as sha256sum prints them"
        yield FieldError(f"{here}.checksum", message, entry.checksum)
