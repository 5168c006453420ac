"""Rules of the spec as CEL, kept as data: they go into the CRD, and ``parse`` evaluates the very same text offline.

``at`` is the schema node that carries the rule (``self`` there), ``field`` the field that a refusal names, relative to
it. A rule whose text holds ``oldSelf`` speaks about a change; it is evaluated only where an old object is at hand.

Of a spec only ``nodes`` and ``suspend`` are always there: the schema has no other defaults, so that what a job leaves
to its profile can be told from what it sets. A rule that looks at several fields takes ``_given`` for the others.
"""

from dataclasses import dataclass

import msgspec

from ddp_operator.api.spec import Metrics, Preflight, Rendezvous, Spec
from ddp_operator.constants import MAX_NAME_LENGTH, MAX_NODES


@dataclass(frozen=True, slots=True)
class Rule:
    """One ``x-kubernetes-validations`` entry."""

    at: str
    cel: str
    message: str
    field: str = ""
    explanation: str = ""
    """What is said instead of ``message`` where only the values tell it: CEL that makes a text of them."""

    @property
    def is_transition(self) -> bool:
        """True where the rule compares with the stored object."""
        return "oldSelf" in self.cel


def _between(at: str, least: int, most: int, remedy: str) -> Rule:
    return Rule(at, f"self >= {least} && self <= {most}", f"must be between {least} and {most}; {remedy}")


def _given(path: str, default: str | int | bool | list[str]) -> str:
    """Return CEL for the value of a member at a path, or what it is where nobody gives it."""
    value = str(default).lower() if isinstance(default, bool) else repr(default)
    return f"({_is_there(path)} ? self.{path} : {value})"


def _is_there(path: str) -> str:
    """Return CEL for whether there is a member at a path, and all above it."""
    parts = path.split(".")
    return " && ".join(f"has(self.{'.'.join(parts[:end])})" for end in range(1, len(parts) + 1))


# The operator asks about a whole spec, with all groups that a job has anyway; what lacks one may be completed yet.
_GROUPS = [
    field.encode_name for field in msgspec.structs.fields(Spec) if field.default_factory is not msgspec.NODEFAULT
]
_PART = f"(has(self.profileRef) && !({' && '.join(map(_is_there, _GROUPS))}))"


def _companion(path: str, wanted: str, message: str) -> Rule:
    """Return a rule that a member at a path has no meaning without others, which a profile may have instead."""
    return Rule("spec", f"{_PART} || !({_is_there(path)}) || {wanted}", message, field=f".{path}")


_BACKEND = _given("rendezvous.backend", Rendezvous().backend)
_REQUIRED = _given("network.require", False)
_CHECKS = _given("preflight.checks", [])
_PORTS = _given("rendezvous.port", Rendezvous().port), _given("metrics.port", Metrics().port)

ONCE_STARTED = ("profileRef", "elastic", "spares", "rendezvous", "metrics", "scheduling", "networkPolicy", "inputs")
"""Fixed from attempt 1 on: objects that serve all attempts are built from them."""
ONCE_RUN = (
    "procPerNode",
    "shm",
    "watchdog",
    "preflight",
    "network",
    "securityProfile",
    "checkpoint",
    "successPolicy",
    "template",
    "code",
    "tracking",
)
"""Fixed once a pod has run; until then an edit replaces the attempt's Job."""
_DEADLINES = ("activeDeadlineSeconds", "pendingDeadlineSeconds")
ONCE_ENDED = ("nodes", "suspend", "recovery", "idle", *_DEADLINES, "processGroupPolicy")
"""Fixed once the job has ended: nothing would follow an edit."""


def _immutable() -> Rule:
    """Return the rule of what may not be changed any more: a job that no pod has run of can be fixed, a later one not.

    One rule for all of them, and it asks first whether it is the status that changes, because then the spec does not
    (they are written at different places). An API server evaluates all rules at each write, also of a status, and
    copies the schema of all members whenever a rule looks at one: a rule for each field cost a third of such a write.
    """
    ended = "has(self.status.completionTime)"
    run = f"({ended} || has(self.status.firstRunTime))"
    groups = ((ONCE_STARTED, ""), (ONCE_RUN, run), (ONCE_ENDED, ended))
    same, changed = [], []
    for names, when in groups:
        kept = [
            f"has(self.spec.{name}) == has(oldSelf.spec.{name})"
            f" && (!has(self.spec.{name}) || self.spec.{name} == oldSelf.spec.{name})"
            for name in names
        ]
        same.append(f"(!{when} || ({' && '.join(kept)}))" if when else " && ".join(kept))
        listed = " + ".join(f"({one} ? '' : 'spec.{name} ')" for name, one in zip(names, kept, strict=True))
        changed.append(f"({when} ? {listed} : '')" if when else listed)
    again = "delete the job and create it again"
    return Rule(
        "",
        "!has(self.status) || !has(oldSelf.status) || self.status != oldSelf.status"
        f" || !has(self.status.attempt) || self.status.attempt == 0 || ({' && '.join(same)})",
        f"{', '.join(ONCE_STARTED)} can't be changed once the job has started; {', '.join(ONCE_RUN)} once a pod has "
        f"run; {', '.join(ONCE_ENDED)} once the job has ended; {again}",
        field=".spec",
        explanation=f"""({" + ".join(changed)}).trim().replace(' ', ', ') + """
        f"""({ended} ? " can't be changed once the job has ended" : " can't be changed once the job has started") + """
        f"""\"; {again}\"""",
    )


# Bounds beyond any real job: they keep numbers within what Kubernetes and Python can hold.
_YEAR = 366 * 24 * 3600
_MAX_RESTARTS = 10_000
_MAX_STEPS = 2**31 - 1
_MAX_PROCESSES = 1024
_MAX_PATTERNS = 8
_MAX_PATTERN = 512

RULES: tuple[Rule, ...] = (
    Rule(
        "",
        f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        f"metadata.name must have at most {MAX_NAME_LENGTH} characters, because pod host names are "
        "<name>-<attempt>-<index>; choose a shorter name",
        field=".metadata.name",
    ),
    Rule(
        "",
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must be lower-case letters, digits and '-', begin with a letter and end with a letter or digit, "
        "because a Service is named after it; change it",
        field=".metadata.name",
    ),
    Rule(
        "spec.profileRef.name",
        "self.matches('^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$')",
        "must consist of lower-case letters, digits, '-' and '.'; change it",
    ),
    _between("spec.nodes", 1, MAX_NODES, "to stop all pods, set suspend: true"),
    _between("spec.spares", 0, 16, "0 has no pod wait"),
    Rule(
        "spec",
        f"!has(self.spares) || self.spares == 0 || (self.nodes > 1 && !has(self.elastic) && {_BACKEND} != 'static')",
        "need a job of fixed size, 2 nodes or more and the c10d rendezvous, as they take the place of pods other than "
        "pod 0; set spares to 0, or change nodes, elastic or rendezvous.backend",
        field=".spares",
    ),
    Rule(
        "spec.elastic",
        "(!has(self.minNodes) || self.minNodes >= 1) && (!has(self.maxNodes)"
        f" || ({_given('minNodes', 1)} <= self.maxNodes && self.maxNodes <= {MAX_NODES}))",
        f"must be 1 <= minNodes <= maxNodes <= {MAX_NODES}; change them",
    ),
    Rule(
        "spec",
        "!has(self.elastic) || ((!has(self.elastic.minNodes) || self.nodes >= self.elastic.minNodes)"
        " && (!has(self.elastic.maxNodes) || self.nodes <= self.elastic.maxNodes))",
        "must be between elastic.minNodes and elastic.maxNodes; change it",
        field=".nodes",
    ),
    Rule(
        "spec",
        f"!has(self.elastic) || {_BACKEND} != 'static'",
        "needs the c10d rendezvous, which pods can join and leave; remove rendezvous.backend",
        field=".elastic",
    ),
    Rule(
        "spec.procPerNode",
        f"type(self) == int ? self >= 1 && self <= {_MAX_PROCESSES}"
        " : (type(self) == string && self in ['auto', 'gpu', 'cpu'])",
        f"must be auto, gpu, cpu or a number between 1 and {_MAX_PROCESSES}; leave it out to use auto",
    ),
    _between("spec.rendezvous.port", 1024, 65535, "leave it out to use the default"),
    _between("spec.metrics.port", 1024, 65535, "leave it out to use the default"),
    Rule(
        "spec.metrics.logPatterns",
        f"size(self) <= {_MAX_PATTERNS} && self.all(p, size(p) <= {_MAX_PATTERN})",
        f"must have at most {_MAX_PATTERNS} expressions of at most {_MAX_PATTERN} characters; remove or shorten some",
    ),
    Rule(
        "spec",
        " != ".join(_PORTS),
        "must differ from rendezvous.port, since pod 0 listens on both; change one of them",
        field=".metrics.port",
    ),
    _between("spec.metrics.epochs", 1, _MAX_STEPS, "leave it out if the log has it"),
    _between("spec.rendezvous.joinTimeoutSeconds", 10, _YEAR, "pods need a few seconds to find each other"),
    Rule(
        "spec",
        f"{_BACKEND} != 'static' || {_given('recovery.inPlaceRestarts', 0)} == 0",
        "must be 0 with the static rendezvous, which can't restart workers; set it to 0 or use backend: c10d",
        field=".recovery.inPlaceRestarts",
    ),
    _between("spec.recovery.inPlaceRestarts", 0, _MAX_RESTARTS, "0 turns restarts in the same pods off"),
    _companion(
        "recovery.nodeHealth",
        f"size({_given('recovery.nodeHealth.conditions', [])}) + size({_given('recovery.nodeHealth.taints', [])}) > 0",
        "needs conditions or taints that are trouble, such as conditions: [Xid*]; add them or remove nodeHealth",
    ),
    *(
        Rule(
            f"spec.recovery.nodeHealth.{name}",
            "size(self) <= 32 && self.all(one, size(one) >= 1 && size(one) <= 316)",
            "must have at most 32 names of 1 to 316 characters; change them",
        )
        for name in ("conditions", "taints")
    ),
    _between("spec.recovery.maxRestarts", 0, _MAX_RESTARTS, "0 lets the first failure end the job"),
    _between("spec.recovery.resetAfterSteps", 1, _MAX_STEPS, "leave it out to use 1000"),
    _between("spec.recovery.forceDeleteAfterSeconds", 0, _YEAR, "leave it out to use 120"),
    Rule(
        "spec.recovery.nonRetryableExitCodes",
        "self.all(c, c >= 1 && c <= 255)",
        "must contain exit codes between 1 and 255; remove the others",
    ),
    *(
        _between(f"spec.watchdog.{name}", 1, _YEAR, "to only report hangs, set action: Report")
        for name in ("startSeconds", "stallSeconds", "checkpointSeconds")
    ),
    _between("spec.idle.minutes", 1, _YEAR // 60, "leave out idle to let GPUs be held"),
    _between("spec.preflight.minMegabytesPerSecond", 0, 10**7, "leave it out to accept any bandwidth"),
    _companion(
        "preflight.minMegabytesPerSecond",
        f"self.preflight.minMegabytesPerSecond == 0 || {_REQUIRED} || 'allreduce' in {_CHECKS} || 'pairs' in {_CHECKS}",
        "needs the check allreduce, which measures it; add allreduce to checks or remove this",
    ),
    Rule(
        "spec",
        f"!{_REQUIRED} || {_given('preflight.mode', Preflight().mode)} != 'Off'",
        "needs the preflight, which finds out what NCCL uses; set preflight.mode to Warn or Fail, or remove this",
        field=".network.require",
    ),
    _between("spec.network.minPairMegabytesPerSecond", 0, 10**7, "leave it out to use the profile's"),
    _companion(
        "network.minPairMegabytesPerSecond",
        f"self.network.minPairMegabytesPerSecond == 0 || {_REQUIRED} || 'pairs' in {_CHECKS}",
        "needs the check pairs, which measures it; add pairs to preflight.checks, set network.require: true, or "
        "remove this",
    ),
    Rule(
        "spec.checkpoint.path",
        "self.startsWith('/')",
        "must be an absolute path, such as /ckpt; add the leading slash",
    ),
    Rule(
        "spec.checkpoint.url",
        "self.matches('^[a-z][a-z0-9+.-]*://[^ ]+$') && !self.matches('^(data|https?|memory)://')",
        "must be a folder of a store that can be written to, such as s3://bucket/prefix; change it",
    ),
    Rule(
        "spec.checkpoint",
        "!has(self.url) || (!has(self.claimName) && !has(self.shared))",
        "must not have url beside claimName or shared: it takes their place, for one job alone; remove it or these",
    ),
    *(
        _companion(f"checkpoint.{name}", "has(self.checkpoint.url)", "is about the url; set that or remove this")
        for name in ("secretRef", "keep")
    ),
    _between("spec.checkpoint.keep", 1, 1000, "leave it out to keep 3"),
    _between("spec.checkpoint.graceSeconds", 0, _YEAR, "0 kills the pods at once"),
    Rule(
        "spec.code",
        "[has(self.configMapName), has(self.claimName), has(self.image)].filter(one, one).size() == 1",
        "must have one of configMapName, claimName and image; `ddp submit --workdir` writes it",
    ),
    Rule(
        "spec.code",
        "has(self.path) == has(self.claimName)",
        "is the archive's path in the claim claimName; set both or remove it",
        field=".path",
    ),
    Rule(
        "spec.code.digest",
        "self.matches('^[0-9a-f]{64}$')",
        "must be a SHA-256 in hex, of 64 characters; `ddp submit --workdir` writes it",
    ),
    Rule(
        "spec.code.image",
        "self.matches('^[^ @]+@sha256:[0-9a-f]{64}$')",
        "must be an image by its digest, repository@sha256:…, for a tag may move and pods that come later would get "
        "other code; `ddp submit --workdir --code-image` writes it",
    ),
    Rule(
        "spec.code.mountPath",
        "self.matches('^/[^:]*[^/:]$') && !self.contains('/..') && !self.startsWith('/opt/ddp-')",
        "must be an absolute path other than / and the operator's own folders, such as /workspace; change it",
    ),
    *(
        Rule(
            f"spec.code.{name}",
            "!self.startsWith('/') && !self.matches('(^|/)[.][.](/|$)')",
            f"must be a path in the {where}, without '..'; change it",
        )
        for name, where in (("path", "claim"), ("pip", "folder"))
    ),
    _companion(
        "tracking",
        "has(self.tracking.tensorboard) || has(self.tracking.mlflow) || has(self.tracking.wandb)",
        "names no tracker; add tensorboard, mlflow or wandb, or remove it",
    ),
    Rule(
        "spec.tracking.runId",
        "self.matches('^[A-Za-z0-9_-]{1,64}$')",
        "must be at most 64 letters, digits, '-' and '_'; leave it out to use the job's name and UID",
    ),
    Rule(
        "spec.tracking.tensorboard.path",
        "self.startsWith('/')",
        "must be an absolute path on a volume, such as /ckpt/tensorboard; add the leading slash",
    ),
    Rule(
        "spec.shm.sizeLimit",
        "self.matches('^[0-9]+([.][0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$')",
        "must be a quantity such as 8Gi; leave it out to use half of the node's memory",
    ),
    _companion(
        "scheduling.queue",
        "(has(self.scheduling.gang) && self.scheduling.gang == 'Volcano')",
        "is for Volcano; set gang: Volcano, or remove it: for Kueue, set the label kueue.x-k8s.io/queue-name",
    ),
    _companion(
        "scheduling.topologyKey",
        "(has(self.scheduling.placement) && self.scheduling.placement != 'Any')",
        "needs placement: Pack or Spread; set one or remove it",
    ),
    Rule(
        "spec.scheduling.topologyKey",
        "self.matches('^([-A-Za-z0-9_.]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$')",
        "must be the key of a node label, such as topology.kubernetes.io/zone; change it",
    ),
    *(
        Rule(
            f"spec.scheduling.{name}",
            "self.matches('^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$')",
            "must consist of lower-case letters, digits, '-' and '.'; change or remove it",
        )
        for name in ("schedulerName", "queue", "priorityClassName")
    ),
    *(
        _companion(
            f"networkPolicy.{name}",
            f"{empty}(has(self.networkPolicy.enabled) && self.networkPolicy.enabled)",
            "has no effect without enabled: true; set that or remove it",
        )
        for name, empty in (("egressCidrs", "size(self.networkPolicy.egressCidrs) == 0 || "), ("metricsFrom", ""))
    ),
    _between("spec.activeDeadlineSeconds", 1, _YEAR, "leave it out for no deadline"),
    _between("spec.pendingDeadlineSeconds", 1, _YEAR, "leave it out to wait without limit"),
    _between("spec.ttlSecondsAfterFinished", 0, _YEAR, "leave it out to keep the finished job"),
    _immutable(),
)
