"""``spec.code``: the archive with the training program, its volumes, and the plan of its unpacking."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from msgspec import Meta

from ddp_operator.api import code_paths, constants
from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.code_source import CLAIM, CONFIG_MAP, IMAGE, describe_revision, split_source
from ddp_operator.api.former import TEXT, FormerField
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import Spec, SpecFields
from ddp_pod.contract.plan import CodeConfig, PodPlan

_LONGEST: Final = {"maxLength": 4096}


class Code(SpecFields, frozen=True, kw_only=True):
    """Working directory of the training command, packed by `ddp submit --workdir`, unpacked in each pod before its
    ranks start."""

    digest: Annotated[
        str, Meta(description="SHA-256 of the archive's tar, in hex; each pod checks it.", extra_json_schema=_LONGEST)
    ]
    source: Annotated[
        str,
        Meta(
            description="Place of the archive. configmap/NAME: its key code.tar.gz. claim/NAME/PATH: a file of a "
            "PersistentVolumeClaim. image/REPOSITORY@sha256:…: /code.tar.gz of your OCI image, as an image volume "
            "(Kubernetes 1.35, or 1.31 with the feature gate ImageVolume).",
            extra_json_schema=_LONGEST,
        ),
    ]
    revision: Annotated[
        str | None,
        Meta(
            description="Name of the code in `kubectl get -o wide`, from `ddp submit`: its Git commit, and of changed "
            "files the digest, such as 1a2b3c4d5e6f-dirty 9f86d081884c.",
            extra_json_schema=_LONGEST,
        ),
    ] = None
    mount_path: Annotated[
        str | None,
        Meta(description="Path of the folder in the pods. Unset: /workspace.", extra_json_schema=_LONGEST),
    ] = None
    pip: Annotated[
        str | None,
        Meta(
            description="Requirements file in the folder; each pod installs it beside the image's packages.",
            extra_json_schema=_LONGEST,
        ),
    ] = None

    @property
    def folder(self) -> str:
        """The path of the folder in the pods."""
        return (self.mount_path or code_paths.CODE_FOLDER).rstrip("/")


class CodeFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    code: Code | None = None


def _plan(job: DDPTrainingJob, plan: PodPlan) -> PodPlan:
    """Return the plan with the archive."""
    code = FIELDS.read(job.spec).code
    if code is None:
        return plan
    config = CodeConfig(
        archive=f"{code_paths.CODE_MOUNT_PATH}/{split_source(code.source).path}",
        digest=code.digest,
        folder=code.folder,
        requirements=code.pip,
        packages=code_paths.PACKAGES_MOUNT_PATH,
    )
    return replace(plan, code=config)


def _add(job: DDPTrainingJob, template: CheckedTemplate, attempt: int) -> PodAddition:
    """Return the volumes of the archive, the folder and its packages."""
    code = FIELDS.read(job.spec).code
    if code is None:
        return PodAddition()
    volumes = []
    mounts = []
    for name, source, path in _list_volumes(code):
        volumes.append({"name": name, **source})
        read_only = {"readOnly": True} if name == constants.CODE_VOLUME else {}
        mounts.append({"name": name, "mountPath": path, **read_only})
    return PodAddition(volumes=volumes, mounts=mounts, working_dir=code.folder)


def _list_volumes(code: Code) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name, source and mount path of each volume."""
    kind, name, _ = split_source(code.source)
    archive: dict[str, Any] = {"configMap": {"name": name}}
    if kind == CLAIM:  # only the mount is read-only: the job may write to the same claim in another volume
        archive = {"persistentVolumeClaim": {"claimName": name}}
    elif kind == IMAGE:
        archive = {"image": {"reference": name, "pullPolicy": "IfNotPresent"}}
    yield constants.CODE_VOLUME, archive, code_paths.CODE_MOUNT_PATH
    yield constants.CODE_FOLDER_VOLUME, {"emptyDir": {}}, code.folder
    if code.pip:
        yield constants.PACKAGES_VOLUME, {"emptyDir": {}}, code_paths.PACKAGES_MOUNT_PATH


def _list_mounts(spec: Spec) -> dict[str, str]:
    code = FIELDS.read(spec).code
    return {} if code is None else {code.folder: "spec.code.mountPath"}


def _take_over_claim(name: Any, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"code": {"source": f"{CLAIM}/{name}/{spec['code'].get('path') or ''}"}}


def _take_over_commit(commit: Any, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    code = spec["code"]
    is_dirty = code.get("dirty") is True
    return {"code": {"revision": describe_revision(str(code.get("digest")), str(commit), is_dirty=is_dirty)}}


FIELDS: Final = OwnFields(
    "code",
    CodeFields,
    rules=(
        CelRule(
            "spec.code.source",
            "self.matches('^(configmap/[^/]+|claim/[^/]+/[^/].*|image/.+)$') && !self.matches('/[.][.](/|$)')",
            "must be configmap/NAME, claim/NAME/PATH without '..', or image/REPOSITORY@sha256:…; use `ddp submit "
            "--workdir`, which sets it",
        ),
        CelRule(
            "spec.code",
            "has(self.path) == has(self.claimName)",
            "must be set together with claimName; write both as source: claim/NAME/PATH",
            field=".path",
        ),
        CelRule(
            "spec.code.digest",
            "self.matches('^[0-9a-f]{64}$')",
            "must be a SHA-256 of 64 hexadecimal digits; use `ddp submit --workdir`, which sets it",
        ),
        CelRule(
            "spec.code.source",
            "!self.startsWith('image/') || self.matches('^[^ @]+[^/@]@sha256:[0-9a-f]{64}$')",
            "must name the image by its digest, repository@sha256:…, because a tag can move and later pods would run "
            "different code; write the digest that the registry shows",
        ),
        CelRule(
            "spec.code.mountPath",
            "self.matches('^/[^:]*[^/:]$') && !self.contains('/..') && !self.startsWith('/opt/ddp-')",
            "must be an absolute path such as /workspace, and neither / nor a folder /opt/ddp-…, which the operator "
            "uses; change it",
        ),
        CelRule(
            "spec.code.pip",
            "!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
            "must be a path in the folder, without '..'; change it",
        ),
    ),
    fixed_once="run",
    mounts=_list_mounts,
    plan=_plan,
    pod=_add,
    former=(
        FormerField(
            "code.configMapName",
            f"write code.source: {CONFIG_MAP}/NAME",
            TEXT,
            lambda name, _: {"code": {"source": f"{CONFIG_MAP}/{name}"}},
        ),
        FormerField("code.claimName", f"write code.source: {CLAIM}/NAME/PATH", TEXT, _take_over_claim),
        FormerField("code.path", f"write code.source: {CLAIM}/NAME/PATH", TEXT, lambda *_: {}),
        FormerField(
            "code.image",
            f"write code.source: {IMAGE}/REPOSITORY@sha256:…",
            {**TEXT, "pattern": "^[^ @]+[^/@]@sha256:[0-9a-f]{64}$"},
            lambda name, _: {"code": {"source": f"{IMAGE}/{name}"}},
        ),
        FormerField("code.commit", "write code.revision", TEXT, _take_over_commit),
        FormerField("code.dirty", "write code.revision", {**TEXT, "type": "boolean"}, lambda *_: {}),
    ),
)
