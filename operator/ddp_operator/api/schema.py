"""The spec of the kernel together with the fields that features own. Pure.

A ``Schema`` is built once from the list of features (``ddp_operator.features.SCHEMA``) and passed to all that parse,
check or document a spec. The kernel's part is ``api/spec.py``; it refuses the fields of a feature that is not there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

import msgspec
from msgspec import NODEFAULT, Struct, structs

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.faults import FAULTS, describe_fault
from ddp_operator.api.former import TEXT, FormerField, describe_members
from ddp_operator.api.spec import Spec, SpecFields
from ddp_operator.api.status import Profile
from ddp_pod.contract.plan import PodPlan

if TYPE_CHECKING:  # a job refers to its schema
    from ddp_operator.api.job import DDPTrainingJob

T = TypeVar("T")
T_co = TypeVar("T_co", bound=SpecFields, covariant=True)
Check = Callable[["DDPTrainingJob", Mapping[str, Any], Mapping[str, Any]], Iterable[FieldError]]
"""Returns the errors of a job that CEL rules cannot find, from its pod spec and its training container."""
Stage = Literal["started", "run", "ended"]
_FIXED: Final[Mapping[Stage, tuple[str, ...]]] = {
    # From attempt 1: the objects that all attempts share are built from them.
    "started": ("elastic", "spares", "rendezvous", "metrics", "scheduling"),
    # After the first pod has run; until then an edit replaces the attempt's Job.
    "run": (
        "procPerNode",
        "sharedMemory",
        "securityProfile",
        "checkpoint",
        "successPolicy",
        "template",
    ),
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
        describe_members(sizeLimit=TEXT),
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


class CheckedTemplate(Protocol):
    """A job's pod template after all checks. Do not change its parts."""

    @property
    def pod(self) -> Mapping[str, Any]:
        """The pod's spec."""

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The container that runs the training script."""

    @property
    def limits(self) -> Mapping[str, Any]:
        """The limits of that container, also those of its pod."""

    @property
    def interpreter(self) -> str:
        """The Python of that container."""


@dataclass(frozen=True, slots=True)
class PodAddition:
    """What a feature adds to the training container, and to its pod.

    ``defaults``: variables that the template may set. ``secrets``: names of Secrets whose keys become variables, before
    the template's sources, which take precedence. ``volumes`` of the pod, ``mounts`` of the training container.
    ``init_containers``: run before those of the template, and mount the launcher. ``working_dir``: of the training
    container, unless the template sets it. ``labels`` and ``annotations`` of the
    pod, and ``fields`` of its spec that the template does not set.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()
    init_containers: Sequence[Mapping[str, Any]] = ()
    working_dir: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


class ChildBody(NamedTuple):
    """A child without what the kernel adds: its kind, name, labels and owner."""

    api_version: str
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OwnChild:
    """An object that a feature adds to the children of a job. It is created before the Job, and the job waits for it.

    ``kind``: as a manifest names it. ``wants``: whether a job has it. ``build``: takes the job and the nodes of the
    attempt. ``is_shared``: all attempts have one, with the name of the job; if another client has created it, it must
    be as the operator would build it, and it is created again once it was deleted. Otherwise each attempt has one, with
    the name of its Job, and that of the former attempt is deleted before.
    """

    kind: str
    wants: Callable[["DDPTrainingJob"], bool]
    build: Callable[["DDPTrainingJob", int], ChildBody]
    is_shared: bool = False


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
class OwnFields(Generic[T_co]):
    """The fields of the spec that a feature owns.

    ``kind``: a struct of them, whose members become members of the spec, or of its group ``at``. ``rules``: with
    ``at`` from ``spec``. ``fixed_once``: when the members of the spec may no longer change; a group of the kernel has
    its own rule. ``check``: what the rules cannot check. ``has_default``: whether the operator's settings may have
    values for jobs that set none. ``switch``: the path of the boolean without which the rest of its group has no
    effect: a job that sets it to false takes nothing of the group from what completes it. ``limits``: what they limit.
    ``mounts``: returns the folders of the training container that nothing else may use, each with its field.
    ``plan`` and ``pod``: what they add to the pods' plan, and to the training pod of an attempt. ``children``: what
    they add to the job's objects. ``prepare``: returns ``Job.spec`` of the Job without ranks that runs before attempt 1
    if a member is set, from the template and the digest of the launcher; the feature's hook ``prepare`` decides about
    it. ``completion``: the members name an object that completes the spec. ``holds``: the job's pods stay between runs.
    ``former``: what the feature owned in the release before.
    """

    feature: str
    kind: type[T_co]
    at: str = ""
    rules: tuple[CelRule, ...] = ()
    fixed_once: Stage | None = None
    check: Check | None = None
    has_default: bool = False
    switch: str = ""
    limits: tuple[Limit, ...] = ()
    mounts: Callable[[Spec], dict[str, str]] | None = None
    plan: Callable[["DDPTrainingJob", PodPlan], PodPlan] | None = None
    pod: Callable[["DDPTrainingJob", CheckedTemplate, int], PodAddition] | None = None
    children: tuple[OwnChild, ...] = ()
    prepare: Callable[["DDPTrainingJob", CheckedTemplate, str], dict[str, Any]] | None = None
    completion: Completion | None = None
    holds: bool = False
    former: tuple[FormerField, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The members as a manifest names them."""
        return tuple(member.encode_name for member in structs.fields(self.kind))

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the members, such as ``spec.recovery.drains``."""
        group = f"spec.{self.at}" if self.at else "spec"
        return tuple(f"{group}.{name}" for name in self.names)

    def read(self, spec: Spec) -> T_co:
        """Return the feature's part of a spec. It is empty in a spec that was parsed without the feature."""
        group: object = getattr(spec, self.at) if self.at else spec
        names = [name for name in self.kind.__struct_fields__ if hasattr(group, name)]
        return self.kind(**{name: getattr(group, name) for name in names})

    def has_defaults(self, spec: Spec) -> bool:
        """Return whether a spec leaves all members at their defaults, so that it asks for nothing of the feature."""
        return self.read(spec) == self.kind()

    def is_set(self, spec: Spec) -> bool:
        """Return whether a spec sets a member."""
        own = self.read(spec)
        return any(getattr(own, name) for name in self.kind.__struct_fields__)


class FeatureFault(InvalidManifest):
    """A hook has a fault, so the spec cannot be used."""


def call_owner(part: OwnFields[SpecFields], job: object, hook: Callable[[], T], kind: Any) -> T:
    """Return what a hook returns. Raises: InvalidManifest; FeatureFault for a fault or another type than ``kind``.

    ``job``: the job, or its name for the log. The job asks for what the hook does.
    """
    try:
        result = hook()
        if not isinstance(result, kind):
            raise TypeError(f"it returned {type(result).__name__}")
        return result
    except InvalidManifest:
        raise
    except Exception as error:
        FAULTS.add(f"feature {part.feature}", str(job), error)
        problem = f"the feature {part.feature} does not work ({describe_fault(error)}); please report it"
        path = part.paths[0] if part.paths else "spec"  # a feature may have no fields
        raise FeatureFault([FieldError(path, problem)]) from error


def call_if_asked(
    part: OwnFields[SpecFields], job: "DDPTrainingJob", hook: Callable[[], T], kind: type[T], default: T
) -> T:
    """As ``call_owner``, but a job that asks for nothing of the feature goes on with ``default`` after a fault."""
    try:
        return call_owner(part, job, hook, kind)
    except FeatureFault:
        if not part.has_defaults(job.spec):
            raise
        return default


class Schema:
    """The fields and rules of the kernel and of features."""

    def __init__(self, owned: Sequence[OwnFields[SpecFields]] = ()) -> None:
        self.owned: Final = tuple(owned)
        self.spec: Final = _compose(self.owned)
        """The struct that a spec is decoded as."""
        self.former: Final = (*_FORMER, *(field for part in self.owned for field in part.former))
        """The fields of the release before, the kernel's first."""
        preparing = [part for part in self.owned if part.prepare is not None]
        self.replacing: Final = (*self.list_fixed("run"), *(name for part in preparing for name in part.names))
        """The members whose change replaces the Job before a pod has run."""

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The members that every spec has, as they have a default below them."""
        return tuple(field.encode_name for field in structs.fields(self.spec) if field.default_factory is not NODEFAULT)

    @cached_property
    def with_defaults(self) -> tuple[str, ...]:
        """The features' members for which the operator's settings may have values."""
        return tuple(name for part in self.owned if part.has_default for name in part.names)

    @cached_property
    def shared_kinds(self) -> frozenset[str]:
        """The kinds of the features' children that all attempts of a job share."""
        return self._list_kinds(is_shared=True)

    @cached_property
    def attempt_kinds(self) -> frozenset[str]:
        """The kinds of the features' children that each attempt has."""
        return self._list_kinds(is_shared=False)

    def _list_kinds(self, *, is_shared: bool) -> frozenset[str]:
        return frozenset(child.kind for part in self.owned for child in part.children if child.is_shared is is_shared)

    def list_children(self, job: "DDPTrainingJob") -> list[tuple[OwnFields[SpecFields], OwnChild]]:
        """Return the features' children that a job has, the shared ones first. Raises: InvalidManifest."""
        wanted = []
        for part in self.owned:
            for child in part.children:
                if call_if_asked(part, job, partial(child.wants, job), bool, default=False):
                    wanted.append((part, child))
        return sorted(wanted, key=lambda item: not item[1].is_shared)

    def list_mounts(self, job: "DDPTrainingJob") -> dict[str, str]:
        """Return the folders of the trainer that features use, each with its field. Raises: InvalidManifest."""
        mounts: dict[str, str] = {}
        for part in self.owned:
            if part.mounts is not None:
                mounts |= call_if_asked(part, job, partial(part.mounts, job.spec), dict, {})
        return mounts

    def find_preparing(self, spec: Spec) -> OwnFields[SpecFields] | None:
        """Return the fields that ask for a Job before attempt 1; None: there is none. It is one feature's at most."""
        return next((part for part in self.owned if part.prepare is not None and part.is_set(spec)), None)

    @cached_property
    def holding(self) -> OwnFields[SpecFields] | None:
        """The fields by which a job's pods stay between runs. They are one feature's at most."""
        return next((part for part in self.owned if part.holds), None)

    def list_fixed(self, stage: Stage) -> tuple[str, ...]:
        """Return the members that may no longer change from a stage of the job on, the kernel's first."""
        return (*_FIXED[stage], *(name for part in self.owned if part.fixed_once == stage for name in part.names))


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
