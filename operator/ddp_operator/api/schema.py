"""The fields that features own, and the spec of the kernel together with them. Pure.

A ``Schema`` is built once from the list of features (``ddp_operator.features.SCHEMA``) and passed to all that parse,
check or document a spec. The kernel's part is ``api/spec.py``; it refuses the fields of a feature that is not there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Union, cast, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct, structs

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.former import TEXT, FormerField, describe_members, list_changed, take_over_former
from ddp_operator.api.parts import REPLACING, SpecPart, SpecSchema, Stage, T_co, call_if_asked
from ddp_operator.api.spec import Spec, SpecFields
from ddp_operator.api.status import Profile

if TYPE_CHECKING:  # a job refers to its schema
    from ddp_operator.api.job import DDPTrainingJob

_FIXED: Final[Mapping[Stage, tuple[str, ...]]] = {
    # From attempt 1: the objects that all attempts share are built from them.
    "started": ("elastic", "spares", "rendezvous", "metrics", "scheduling"),
    # After the first pod has run; until then an edit replaces the attempt's Job.
    "run": (*REPLACING, "shm"),
    # After the job has ended: an edit would have no effect.
    "ended": (
        "nodes",
        "suspend",
        "recovery",
        "activeDeadlineSeconds",
        "pendingDeadlineSeconds",
    ),
}
"""The kernel's members that may no longer change."""
_FORMER: Final = (
    FormerField(
        "shm",
        "write sharedMemory: 8Gi with the value of its sizeLimit",
        describe_members(sizeLimit={**TEXT, "pattern": "^[0-9]+([.][0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"}),
        lambda shm, _: {"sharedMemory": shm["sizeLimit"]} if isinstance(shm, Mapping) and "sizeLimit" in shm else {},
    ),
    FormerField(
        "scheduling.schedulerName",
        "write template.spec.schedulerName",
        TEXT,
        lambda name, _: {"template": {"spec": {"schedulerName": name}}},
    ),
    FormerField(
        "scheduling.priorityClassName",
        "write template.spec.priorityClassName",
        TEXT,
        lambda name, _: {"template": {"spec": {"priorityClassName": name}}},
    ),
)
"""The kernel's fields of the release before."""


@dataclass(frozen=True, slots=True)
class Completion:
    """How a feature completes the spec of a job that names an object with further values.

    ``kinds``: of these objects. ``remedy``: of a field that has no value. ``refer``: returns kind and name of the
    object that a resource names; None: it names none. ``read``: returns its values; raises InvalidManifest. ``merge``:
    returns the whole spec, from the written one and the values. In a cluster the feature's service finds the values
    (``reconcile/completing``), for a file ``job_file``.
    """

    kinds: tuple[str, ...]
    remedy: str
    refer: Callable[[Mapping[str, Any]], tuple[str, str] | None]
    read: Callable[[Mapping[str, Any]], Profile]
    merge: Callable[[Mapping[str, Any], Profile], dict[str, Any]]


class Limit(NamedTuple):
    """A limit that can end a job or an attempt: a row of docs/api.md.

    ``reason``: of the condition Failed, or another result. ``change``: the field that sets the limit.
    """

    what: str
    value: object
    reason: str
    change: str = "fixed"


@dataclass(frozen=True, slots=True, eq=False)
class OwnFields(SpecPart[T_co]):
    """The fields of the spec that a feature owns.

    ``rules``: with ``at`` from ``spec``. ``has_default``: whether the operator's settings may have values for jobs
    that set none. ``switch``: the path of the boolean without which the rest of its group has no effect: a job that
    sets it to false takes nothing of the group from what completes it. ``limits``: what they limit. ``mounts``:
    returns the folders of the training container that nothing else may use, each with its field. ``completion``: the
    members name an object that completes the spec. ``former``: what the feature owned in the release before.
    """

    rules: tuple[CelRule, ...] = ()
    has_default: bool = False
    switch: str = ""
    limits: tuple[Limit, ...] = ()
    mounts: Callable[[Spec], dict[str, str]] | None = None
    completion: Completion | None = None
    former: tuple[FormerField, ...] = ()


class Schema(SpecSchema):
    """The fields and rules of the kernel and of features."""

    def __init__(self, owned: Sequence[OwnFields[SpecFields]] = ()) -> None:
        self.owned: Final = tuple(owned)
        super().__init__(self.owned, _compose(self.owned))
        self.former: Final = (*_FORMER, *(field for part in self.owned for field in part.former))
        """The fields of the release before, the kernel's first."""

    def take_over(self, spec: Any) -> Any:
        """Return a spec in the form of this version. Raises: InvalidManifest, if a field has no replacement."""
        return take_over_former(spec, self.former)

    def list_former(self, spec: Any) -> Mapping[str, Any]:
        """Return what the digest of a stored spec has in the form of the release before; None: it lacks the member."""
        digested = {*self.replacing, *(field.path for field in self.former)}
        changed = {name: value for name, value in list_changed(spec, self.former).items() if name in digested}
        empty: dict[str, Any] = {name: {} for name in self.groups if name in changed and changed[name] is None}
        return {"shm": {}, **changed, **empty}

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The members that every spec has, as they have a default below them."""
        return tuple(field.encode_name for field in structs.fields(self.spec) if field.default_factory is not NODEFAULT)

    @cached_property
    def with_defaults(self) -> tuple[str, ...]:
        """The features' members for which the operator's settings may have values."""
        return tuple(name for part in self.owned if part.has_default for name in part.names)

    def list_fixed(self, stage: Stage) -> tuple[str, ...]:
        """Return the members that may no longer change from a stage of the job on, the kernel's first."""
        parts = [part for part in self.owned if part.fixed_once == stage]
        former = (field.path for part in parts for field in part.former if "." not in field.path)
        return (*_FIXED[stage], *(name for part in parts for name in part.names), *former)


def list_mounts(job: "DDPTrainingJob") -> dict[str, str]:
    """Return the folders of the trainer that features use, each with its field. Raises: InvalidManifest."""
    mounts: dict[str, str] = {}
    for part in job.schema.parts:
        if isinstance(part, OwnFields) and part.mounts is not None:
            mounts |= call_if_asked(part, job, partial(part.mounts, job.spec), dict, {})
    return mounts


def _compose(owned: Iterable[OwnFields[SpecFields]]) -> type[Spec]:
    """Return the kernel's spec with the members of features."""
    by_group: dict[str, list[structs.FieldInfo]] = {}
    for part in owned:
        by_group.setdefault(part.at, []).extend(structs.fields(part.kind))
    if not by_group:
        return Spec
    added = by_group.pop("", [])
    groups = [member for member in structs.fields(Spec) if member.name in by_group]
    assert len(groups) == len(by_group), f"the spec has not all of the groups {', '.join(by_group)}"
    for group in groups:
        added.append(_extend_group(group, by_group[group.name]))
    return cast(type[Spec], _extend(Spec, added))


def _extend(base: type[Struct], members: Iterable[structs.FieldInfo]) -> type[Struct]:
    fields = [(member.name, member.type, _read_default(member)) for member in members]
    namespace = {"__doc__": base.__doc__}
    return msgspec.defstruct(base.__name__, fields, bases=(base,), namespace=namespace, frozen=True, kw_only=True)


def _read_default(member: structs.FieldInfo) -> Any:
    if member.default is not NODEFAULT:
        return msgspec.field(default=member.default)
    if member.default_factory is not NODEFAULT:
        return msgspec.field(default_factory=member.default_factory)
    return msgspec.field()


def _extend_group(group: structs.FieldInfo, members: Sequence[structs.FieldInfo]) -> structs.FieldInfo:
    """Return a member of the spec whose struct has further members."""
    extended: dict[type, type[Struct]] = {}

    def extend(kind: Any) -> Any:
        if get_origin(kind) is Annotated:
            base, *notes = get_args(kind)
            return Annotated[(extend(base), *notes)]
        if get_origin(kind) in (Union, UnionType):
            return Union[tuple(extend(part) for part in get_args(kind))]  # noqa: UP007 - of a computed tuple
        if isinstance(kind, type) and issubclass(kind, SpecFields):
            return extended.setdefault(kind, _extend(kind, members))
        return kind

    kind = extend(group.type)
    factory = extended.get(group.default_factory, group.default_factory)
    return structs.FieldInfo(group.name, group.encode_name, kind, group.default, factory)


KERNEL: Final = Schema()
"""Without features."""
