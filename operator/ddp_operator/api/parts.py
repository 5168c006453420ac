"""What the kernel asks the fields of features for: checks, the pods' plan, what they add to pods and children. Pure.

A feature declares its fields as ``api/schema.OwnFields``, a ``SpecPart``. Commands and the CRD read the rest of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from msgspec import structs

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.faults import FAULTS, describe_fault
from ddp_operator.api.spec import Spec, SpecFields
from ddp_pod.contract.plan import PodPlan

if TYPE_CHECKING:  # a job refers to its schema
    from ddp_operator.api.job import DDPTrainingJob

T = TypeVar("T")
T_co = TypeVar("T_co", bound=SpecFields, covariant=True)
Check = Callable[["DDPTrainingJob", Mapping[str, Any], Mapping[str, Any]], Iterable[FieldError]]
"""Returns the errors of a job that CEL rules cannot find, from its pod spec and its training container."""
Stage = Literal["started", "run", "ended"]
REPLACING: Final = ("procPerNode", "sharedMemory", "securityProfile", "checkpoint", "successPolicy", "template")
"""The kernel's members whose change replaces the attempt's Job until the first pod has run; later they are fixed."""


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
    container, unless the template sets it. ``labels`` and ``annotations`` of the pod, ``fields`` of its spec that the
    template does not set, and those ``replaced`` whatever it sets.
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
    replaced: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, eq=False)
class SpecPart(Generic[T_co]):
    """A part of the spec that a feature owns.

    ``kind``: a struct of its members, which become members of the spec, or of its group ``at``. ``fixed_once``: when
    the members of the spec may no longer change; a group of the kernel has its own rule. ``check``: what the rules
    cannot check. ``plan`` and ``pod``: what they add to the pods' plan, and to the training pod of an attempt.
    ``children``: what they add to the job's objects. ``prepare``: returns ``Job.spec`` of the Job without ranks that
    runs before attempt 1 if a member is set, from the template and the digest of the launcher; the feature's hook
    ``prepare`` decides about it. ``holds``: the job's pods stay between runs.
    """

    feature: str
    kind: type[T_co]
    at: str = ""
    fixed_once: Stage | None = None
    check: Check | None = None
    plan: Callable[["DDPTrainingJob", PodPlan], PodPlan] | None = None
    pod: Callable[["DDPTrainingJob", CheckedTemplate, int], PodAddition] | None = None
    children: tuple[OwnChild, ...] = ()
    prepare: Callable[["DDPTrainingJob", CheckedTemplate, str], dict[str, Any]] | None = None
    holds: bool = False

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


def call_owner(part: SpecPart[SpecFields], job: object, hook: Callable[[], T], kind: Any) -> T:
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
    part: SpecPart[SpecFields], job: "DDPTrainingJob", hook: Callable[[], T], kind: type[T], default: T
) -> T:
    """As ``call_owner``, but a job that asks for nothing of the feature goes on with ``default`` after a fault."""
    try:
        return call_owner(part, job, hook, kind)
    except FeatureFault:
        if not part.has_defaults(job.spec):
            raise
        return default


class SpecSchema:
    """The spec of the kernel with the parts of features. ``spec``: the struct that a spec is decoded as."""

    def __init__(self, parts: Sequence[SpecPart[SpecFields]] = (), spec: type[Spec] = Spec) -> None:
        self.parts: Final = tuple(parts)
        self.spec: Final = spec
        changed = [part for part in self.parts if part.fixed_once == "run" or part.prepare is not None]
        self.replacing: Final = (*REPLACING, *(name for part in changed for name in part.names))
        """The members whose change replaces the Job before a pod has run."""

    def take_over(self, spec: Any) -> Any:
        """Return a spec in the form of this version. Raises: InvalidManifest, if a field has no replacement."""
        return spec

    def list_former(self, spec: Any) -> Mapping[str, Any]:
        """Return what the digest of a stored spec has in the form of the release before; None: it lacks the member."""
        return {}

    @cached_property
    def shared_kinds(self) -> frozenset[str]:
        """The kinds of the features' children that all attempts of a job share."""
        return self._list_kinds(is_shared=True)

    @cached_property
    def attempt_kinds(self) -> frozenset[str]:
        """The kinds of the features' children that each attempt has."""
        return self._list_kinds(is_shared=False)

    def _list_kinds(self, *, is_shared: bool) -> frozenset[str]:
        return frozenset(child.kind for part in self.parts for child in part.children if child.is_shared is is_shared)

    def list_children(self, job: "DDPTrainingJob") -> list[tuple[SpecPart[SpecFields], OwnChild]]:
        """Return the features' children that a job has, the shared ones first. Raises: InvalidManifest."""
        wanted = []
        for part in self.parts:
            for child in part.children:
                if call_if_asked(part, job, partial(child.wants, job), bool, default=False):
                    wanted.append((part, child))
        return sorted(wanted, key=lambda item: not item[1].is_shared)

    def find_preparing(self, spec: Spec) -> SpecPart[SpecFields] | None:
        """Return the fields that ask for a Job before attempt 1; None: there is none. It is one feature's at most."""
        return next((part for part in self.parts if part.prepare is not None and part.is_set(spec)), None)

    @cached_property
    def holding(self) -> SpecPart[SpecFields] | None:
        """The fields by which a job's pods stay between runs. They are one feature's at most."""
        return next((part for part in self.parts if part.holds), None)


NO_PARTS: Final = SpecSchema()
"""Without features."""
