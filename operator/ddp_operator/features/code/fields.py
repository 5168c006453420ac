"""``spec.code``: the archive with the training program, its volumes, and the plan of its unpacking."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final

from msgspec import Meta

from ddp_operator.api import code_paths, constants
from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import Spec, SpecFields
from ddp_pod.contract.plan import CodeConfig, PodPlan

_LONGEST: Final = {"maxLength": 4096}


class Code(SpecFields, frozen=True, kw_only=True):
    """Working directory of the training command, packed by `ddp submit --workdir`, unpacked in each pod before its
    ranks start. Set one of configMapName, claimName and image."""

    digest: Annotated[
        str, Meta(description="SHA-256 of the archive's tar, in hex; each pod checks it.", extra_json_schema=_LONGEST)
    ]
    config_map_name: Annotated[
        str | None, Meta(description="ConfigMap whose key code.tar.gz is the archive.", extra_json_schema=_LONGEST)
    ] = None
    claim_name: Annotated[
        str | None, Meta(description="PersistentVolumeClaim with the archive.", extra_json_schema=_LONGEST)
    ] = None
    path: Annotated[str | None, Meta(description="Path of the archive in the claim.", extra_json_schema=_LONGEST)] = (
        None
    )
    image: Annotated[
        str | None,
        Meta(
            description="Your OCI image, named by its digest, with the archive as /code.tar.gz: an image volume "
            "(Kubernetes 1.35, or 1.31 with the feature gate ImageVolume).",
            extra_json_schema=_LONGEST,
        ),
    ] = None
    commit: Annotated[str | None, Meta(description="Git commit of the folder.", extra_json_schema=_LONGEST)] = None
    dirty: Annotated[bool | None, Meta(description="True: the folder has changes since that commit.")] = None
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
        archive=f"{code_paths.CODE_MOUNT_PATH}/{code.path or code_paths.CODE_FILE}",
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
    archive: dict[str, Any] = {"configMap": {"name": code.config_map_name}}
    if code.claim_name:  # only the mount is read-only: the job may write to the same claim in another volume
        archive = {"persistentVolumeClaim": {"claimName": code.claim_name}}
    elif code.image:
        archive = {"image": {"reference": code.image, "pullPolicy": "IfNotPresent"}}
    yield constants.CODE_VOLUME, archive, code_paths.CODE_MOUNT_PATH
    yield constants.CODE_FOLDER_VOLUME, {"emptyDir": {}}, code.folder
    if code.pip:
        yield constants.PACKAGES_VOLUME, {"emptyDir": {}}, code_paths.PACKAGES_MOUNT_PATH


def _list_mounts(spec: Spec) -> dict[str, str]:
    code = FIELDS.read(spec).code
    return {} if code is None else {code.folder: "spec.code.mountPath"}


FIELDS: Final = OwnFields(
    "code",
    CodeFields,
    rules=(
        CelRule(
            "spec.code",
            "[has(self.configMapName), has(self.claimName), has(self.image)].filter(one, one).size() == 1",
            "must have exactly one of configMapName, claimName and image; use `ddp submit --workdir`, which sets it",
        ),
        CelRule(
            "spec.code",
            "has(self.path) == has(self.claimName)",
            "must be set together with claimName: it is the path of the archive in the claim; set both or none",
            field=".path",
        ),
        CelRule(
            "spec.code.digest",
            "self.matches('^[0-9a-f]{64}$')",
            "must be a SHA-256 of 64 hexadecimal digits; use `ddp submit --workdir`, which sets it",
        ),
        CelRule(
            "spec.code.image",
            "self.matches('^[^ @]+@sha256:[0-9a-f]{64}$')",
            "must name the image by its digest, repository@sha256:…, because a tag can move and later pods would run "
            "different code; write the digest that the registry shows",
        ),
        CelRule(
            "spec.code.mountPath",
            "self.matches('^/[^:]*[^/:]$') && !self.contains('/..') && !self.startsWith('/opt/ddp-')",
            "must be an absolute path such as /workspace, and neither / nor a folder /opt/ddp-…, which the operator "
            "uses; change it",
        ),
        *(
            CelRule(
                f"spec.code.{name}",
                "!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
                f"must be a path in the {where}, without '..'; change it",
            )
            for name, where in (("path", "claim"), ("pip", "folder"))
        ),
    ),
    fixed_once="run",
    mounts=_list_mounts,
    plan=_plan,
    pod=_add,
)
