"""The CEL rules of the spec as data: the CRD contains them, and ``cel`` evaluates the same text offline.

``RULES`` are those of the kernel's fields; ``list_rules`` has those of features, too.

``at`` is the schema node of the rule (its ``self``). ``field`` is the field that a refusal names, relative to ``at``.
A rule whose text contains ``oldSelf`` is a transition rule; it is evaluated only if the stored object is known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.completion import find_completing
from ddp_operator.api.constants import MAX_NODES
from ddp_operator.api.rule_builders import (
    YEAR,
    is_set,
    read_or_default,
    require,
    require_between,
    require_folder_url,
    require_label_key,
)
from ddp_operator.api.schema import Schema
from ddp_operator.api.spec import Metrics, Rendezvous


@cache
def list_rules(schema: Schema) -> tuple[CelRule, ...]:
    """Return the rules of the kernel and of features, the kernel's first."""
    written = (*RULES, *(rule for part in schema.owned for rule in part.rules))
    return (*_complete_rules(written, schema), _forbid_changes(schema))


def _complete_rules(rules: Iterable[CelRule], schema: Schema) -> Iterator[CelRule]:
    """Yield the rules; those of complete specs ignore one that lacks a group with defaults: a profile may add to it."""
    completing = find_completing(schema)
    if completing is None:
        yield from rules
        return
    names_values = " || ".join(map(is_set, completing.names))
    is_incomplete = f"({names_values} && !({' && '.join(map(is_set, schema.groups))}))"
    for rule in rules:
        yield replace(rule, cel=f"{is_incomplete} || {rule.cel}") if rule.if_complete else rule


_BACKEND = read_or_default("rendezvous.backend", Rendezvous().backend)
_PORTS = read_or_default("rendezvous.port", Rendezvous().port), read_or_default("metrics.port", Metrics().port)


def _forbid_changes(schema: Schema) -> CelRule:
    """Return the rule of the immutable fields, which depend on how far the job is.

    This is one rule for all fields, because the API server evaluates all rules at each write, also of the status, and
    copies the schema of all members whenever a rule reads one: a rule for each field cost a third of such a write. The
    rule first compares the status: a write that changes the status cannot change the spec.
    """
    once_started = schema.list_fixed("started")
    once_run = schema.list_fixed("run")
    once_ended = schema.list_fixed("ended")
    has_ended = "has(self.status.completionTime)"
    has_run = f"({has_ended} || has(self.status.firstRunTime))"
    groups = ((once_started, ""), (once_run, has_run), (once_ended, has_ended))
    unchanged_groups = []
    changed_names = []
    for names, condition in groups:
        comparisons = {name: _is_unchanged(name) for name in names}
        all_unchanged = " && ".join(comparisons.values())
        listed = " + ".join(f"({unchanged} ? '' : 'spec.{name} ')" for name, unchanged in comparisons.items())
        if condition:
            unchanged_groups.append(f"(!{condition} || ({all_unchanged}))")
            changed_names.append(f"({condition} ? {listed} : '')")
        else:
            unchanged_groups.append(all_unchanged)
            changed_names.append(listed)
    remedy = "delete the job and create it again"
    return CelRule(
        "",
        "!has(self.status) || !has(oldSelf.status) || self.status != oldSelf.status"
        f" || !has(self.status.attempt) || self.status.attempt == 0 || ({' && '.join(unchanged_groups)})",
        f"{', '.join(once_started)} can't be changed once the job has started; {', '.join(once_run)} once a pod has "
        f"run; {', '.join(once_ended)} once the job has ended; {remedy}",
        field=".spec",
        explanation=f"""({" + ".join(changed_names)}).trim().replace(' ', ', ') + """
        f"""({has_ended} ? " can't be changed once the job has ended" """
        """: " can't be changed once the job has started") + """
        f"""\"; {remedy}\"""",
    )


def _is_unchanged(name: str) -> str:
    """Return CEL that is true if a field of the spec equals that of the stored object."""
    return (
        f"has(self.spec.{name}) == has(oldSelf.spec.{name})"
        f" && (!has(self.spec.{name}) || self.spec.{name} == oldSelf.spec.{name})"
    )


# <name>-<attempt>-<index> must be a DNS label of at most 63 characters: 50 + "-" + 6 + "-" + 5.
_MAX_NAME_LENGTH = 50
# Bounds beyond any real job, which Kubernetes and Python can represent.
_MAX_RESTARTS = 10_000
_MAX_STEPS = 2**31 - 1
_MAX_PROCESSES = 1024
_MAX_PATTERNS = 8
_MAX_PATTERN = 512

RULES: tuple[CelRule, ...] = (
    CelRule(
        "",
        f"size(self.metadata.name) <= {_MAX_NAME_LENGTH}",
        f"metadata.name must have at most {_MAX_NAME_LENGTH} characters, because pod host names are "
        "<name>-<attempt>-<index>; choose a shorter name",
        field=".metadata.name",
    ),
    CelRule(
        "",
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must consist of lower-case letters, digits and '-', start with a letter and end with a letter "
        "or digit, because the job's Service has the same name; change it",
        field=".metadata.name",
    ),
    require_between("spec.nodes", 1, MAX_NODES, "to stop all pods, set suspend: true"),
    CelRule(
        "spec.managedBy",
        "size(self) <= 63 && self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9/_.~]+$')",
        "must be a domain with a path, such as kueue.x-k8s.io/multikueue, of at most 63 characters; change it",
    ),
    CelRule(
        "spec",
        "has(self.managedBy) == has(oldSelf.managedBy)"
        " && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
        "can't be changed; delete the job and create it again",
        field=".managedBy",
    ),
    require_between("spec.spares", 0, 16, "to have no spare pods, set it to 0"),
    CelRule(
        "spec",
        f"!has(self.spares) || self.spares == 0 || (self.nodes > 1 && !has(self.elastic) && {_BACKEND} != 'static')",
        "needs a job of fixed size with 2 nodes or more and the c10d rendezvous, because a spare replaces any pod "
        "except pod 0; set spares to 0, or change nodes, elastic or rendezvous.backend",
        field=".spares",
    ),
    CelRule(
        "spec.elastic",
        "(!has(self.minNodes) || self.minNodes >= 1) && (!has(self.maxNodes)"
        f" || ({read_or_default('minNodes', 1)} <= self.maxNodes && self.maxNodes <= {MAX_NODES}))",
        f"must be 1 <= minNodes <= maxNodes <= {MAX_NODES}; change them",
    ),
    CelRule(
        "spec",
        "!has(self.elastic) || ((!has(self.elastic.minNodes) || self.nodes >= self.elastic.minNodes)"
        " && (!has(self.elastic.maxNodes) || self.nodes <= self.elastic.maxNodes))",
        "must be between elastic.minNodes and elastic.maxNodes; change it",
        field=".nodes",
    ),
    CelRule(
        "spec",
        f"!has(self.elastic) || {_BACKEND} != 'static'",
        "needs the c10d rendezvous, which pods can join and leave; remove rendezvous.backend",
        field=".elastic",
    ),
    CelRule(
        "spec.procPerNode",
        f"type(self) == int ? self >= 1 && self <= {_MAX_PROCESSES}"
        " : (type(self) == string && self in ['auto', 'gpu', 'cpu'])",
        f"must be auto, gpu, cpu or a number between 1 and {_MAX_PROCESSES}; leave it out to use auto",
    ),
    require_between("spec.rendezvous.port", 1024, 65535, "leave it out to use the default"),
    require_between("spec.metrics.port", 1024, 65535, "leave it out to use the default"),
    CelRule(
        "spec.metrics.logPatterns",
        f"size(self) <= {_MAX_PATTERNS} && self.all(p, size(p) <= {_MAX_PATTERN})",
        f"must have at most {_MAX_PATTERNS} expressions of at most {_MAX_PATTERN} characters; remove or shorten some",
    ),
    CelRule(
        "spec",
        " != ".join(_PORTS),
        "must differ from rendezvous.port, because pod 0 listens on both; change one of them",
        field=".metrics.port",
    ),
    require_between("spec.metrics.epochs", 1, _MAX_STEPS, "leave it out if the log shows the total"),
    require_between("spec.rendezvous.joinTimeoutSeconds", 10, YEAR, "pods need a few seconds to join"),
    CelRule(
        "spec",
        f"{_BACKEND} != 'static' || {read_or_default('recovery.inPlaceRestarts', 0)} == 0",
        "must be 0 with the static rendezvous, which can't restart workers; set it to 0 or set rendezvous.backend: "
        "c10d",
        field=".recovery.inPlaceRestarts",
    ),
    require_between("spec.recovery.inPlaceRestarts", 0, _MAX_RESTARTS, "0 disables restarts in the same pods"),
    require_between("spec.recovery.maxRestarts", 0, _MAX_RESTARTS, "with 0 the first failure ends the job"),
    require_between("spec.recovery.resetAfterSteps", 1, _MAX_STEPS, "leave it out to use 1000"),
    require_between("spec.recovery.forceDeleteAfterSeconds", 0, YEAR, "leave it out to use 120"),
    CelRule(
        "spec.recovery.nonRetryableExitCodes",
        "self.all(c, c >= 1 && c <= 255)",
        "must contain only exit codes between 1 and 255; remove all other values",
    ),
    CelRule(
        "spec.checkpoint.path",
        "self.startsWith('/')",
        "must be an absolute path, such as /ckpt; add the leading slash",
    ),
    require_folder_url("spec.checkpoint.url"),
    CelRule(
        "spec.checkpoint",
        "!has(self.url) || (!has(self.claimName) && !has(self.shared))",
        "must not have url together with claimName or shared, because a url replaces the claim and serves one job "
        "only; remove url, or claimName and shared",
    ),
    *(
        require(f"checkpoint.{name}", "has(self.checkpoint.url)", "needs checkpoint.url; set it or remove this field")
        for name in ("secretRef", "keep")
    ),
    require_between("spec.checkpoint.keep", 1, 1000, "leave it out to keep 3 snapshots"),
    require_between("spec.checkpoint.graceSeconds", 0, YEAR, "with 0 pods are killed at once"),
    CelRule(
        "spec.sharedMemory",
        "self.matches('^([0-9]+([.][0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?|[1-9][0-9]?%)$')",
        "must be a quantity such as 8Gi, or a share such as 50%; leave it out to use half of the node's memory",
    ),
    require(
        "scheduling.topologyKey",
        "(has(self.scheduling.placement) && self.scheduling.placement != 'Any')",
        "needs scheduling.placement: Pack or Spread; set one of them or remove this field",
    ),
    require_label_key("spec.scheduling.topologyKey"),
    require_between("spec.activeDeadlineSeconds", 1, YEAR, "leave it out for no deadline"),
    require_between("spec.pendingDeadlineSeconds", 1, YEAR, "leave it out to wait without limit"),
    require_between("spec.ttlSecondsAfterFinished", 0, YEAR, "leave it out to keep the finished job"),
)
