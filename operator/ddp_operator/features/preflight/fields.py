"""``spec.preflight``: its rules, the check of the pods, and the plan of the checks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.constants import PREFLIGHT_CHECKS
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.former import TEXT, FormerField, describe_members
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.resources import count_pod_gpus
from ddp_operator.api.rule_builders import read_or_default, require, require_between
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_pod.contract.plan import PodPlan, PreflightConfig

NETWORK_PROFILE_REMOVED: Final = (
    "removed; apply deploy/profiles/fabric-<name>.yaml and name it in spec.profileRef, or write its fields into the "
    "template (docs/scaling.md); remove this field"
)


class Preflight(SpecFields, frozen=True, kw_only=True):
    """Network checks before training, once all pods of an attempt have joined. The status has the results."""

    mode: Annotated[
        Literal["Off", "Warn", "Fail"],
        Meta(description="Fail: a failed check fails the attempt. Warn: it is only reported. Off: no checks."),
    ] = "Warn"
    checks: Annotated[
        tuple[Literal["dns", "tcp", "allreduce", "pairs"], ...],
        Meta(
            description="dns: resolve the names of pod 0 and the next pod. tcp: connect to both. allreduce: "
            "measure the bandwidth over all ranks, in some seconds. pairs: allreduce, and pairs of "
            "pods, at most eight for each pod."
        ),
    ] = ("dns", "tcp")
    min_megabytes_per_second: Annotated[
        int, Meta(description="Minimum bus bandwidth of allreduce, in 10^6 bytes per second.")
    ] = 0
    transports: Annotated[
        tuple[str, ...],
        Meta(
            description="Transports that require accepts, by their names in NCCL's log, such as IB and NVLink, up "
            "to 8. Empty: all but Socket."
        ),
    ] = ()
    require: Annotated[
        bool,
        Meta(
            description="True: the attempt of more than one pod fails before training if NCCL uses another transport, "
            "or a pair of pods is too slow, whatever the mode (docs/scaling.md)."
        ),
    ] = False
    min_pair_megabytes_per_second: Annotated[
        int | None,
        Meta(description="Minimum bandwidth of pairs, in 10^6 bytes per second. Unset: none."),
    ] = None


class PreflightFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    preflight: Preflight = field(default_factory=Preflight)


def _has_network(job: DDPTrainingJob) -> bool:
    """Return whether pods of a job may exchange data."""
    return job.spec.nodes > 1 or job.spec.elastic is not None


def _plan(job: DDPTrainingJob, plan: PodPlan) -> PodPlan:
    """Return the plan with the checks before training and their thresholds, if there are checks."""
    preflight = FIELDS.read(job.spec).preflight
    is_required = preflight.require and _has_network(job)
    min_pair_megabytes = (preflight.min_pair_megabytes_per_second or 0) if _has_network(job) else 0

    selected = set[str](preflight.checks)
    if is_required:
        selected.add("allreduce")
        if min_pair_megabytes:
            selected.add("pairs")
    checks = tuple(check for check in PREFLIGHT_CHECKS if check in selected)
    if not checks or preflight.mode == "Off":
        return plan
    config = PreflightConfig(
        fail=preflight.mode == "Fail",
        checks=checks,
        min_bytes_per_second=preflight.min_megabytes_per_second * 10**6,
        min_pair_bytes_per_second=min_pair_megabytes * 1e6,
        require=is_required,
        transports=preflight.transports,
    )
    return replace(plan, preflight=config)


def _check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check that the pods can use the required network."""
    preflight = FIELDS.read(job.spec).preflight
    if (
        preflight.require
        and _has_network(job)
        and "Socket" not in preflight.transports
        and not (count_pod_gpus(pod) or pod.get("resourceClaims"))
    ):
        message = (
            "needs GPUs, because gloo on CPUs uses sockets; add nvidia.com/gpu to the trainer's limits, or remove this "
            "field"
        )
        yield FieldError("spec.preflight.require", message, value=True)


def _take_over_network(network: Any, _: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(network, Mapping):
        return {}
    profile = network.get("profile")
    if profile not in (None, "auto"):  # without the fields of the fabric the job would train over another network
        raise InvalidManifest([FieldError("spec.network.profile", NETWORK_PROFILE_REMOVED, profile)])
    return {"preflight": {name: value for name, value in network.items() if name != "profile"}}


# A job may have the former field.
_REQUIRED: Final = f"({read_or_default('preflight.require', False)} || {read_or_default('network.require', False)})"
_CHECKS: Final = read_or_default("preflight.checks", [])
FIELDS: Final = OwnFields(
    "preflight",
    PreflightFields,
    rules=(
        require_between("spec.preflight.minMegabytesPerSecond", 0, 10**7, "leave it out to accept any bandwidth"),
        require(
            "preflight.minMegabytesPerSecond",
            f"self.preflight.minMegabytesPerSecond == 0 || {_REQUIRED} || 'allreduce' in {_CHECKS}"
            f" || 'pairs' in {_CHECKS}",
            "needs the check allreduce, which measures the bandwidth; add allreduce to preflight.checks or remove this "
            "field",
        ),
        CelRule(
            "spec",
            f"!{_REQUIRED} || {read_or_default('preflight.mode', Preflight().mode)} != 'Off'",
            "needs the preflight, which detects the network that NCCL uses; set preflight.mode to Warn or Fail, or "
            "remove this field",
            field=".preflight.require",
        ),
        CelRule(
            "spec.preflight.transports",
            "size(self) <= 8 && self.all(t, size(t) >= 1 && size(t) <= 40)",
            "must have at most 8 names of 1 to 40 characters; change them",
        ),
        require_between("spec.preflight.minPairMegabytesPerSecond", 0, 10**7, "leave it out for no minimum"),
        require(
            "preflight.minPairMegabytesPerSecond",
            f"self.preflight.minPairMegabytesPerSecond == 0 || {_REQUIRED} || 'pairs' in {_CHECKS}",
            "needs the check pairs, which measures the bandwidth; add pairs to preflight.checks, set "
            "preflight.require: true, or remove this field",
        ),
    ),
    fixed_once="run",
    check=_check,
    plan=_plan,
    former=(
        FormerField(
            "network",
            "write transports, require and minPairMegabytesPerSecond into preflight; for profile, name one of "
            "deploy/profiles in profileRef",
            describe_members(
                profile={
                    **TEXT,
                    "x-kubernetes-validations": [{"rule": "self == 'auto'", "message": NETWORK_PROFILE_REMOVED}],
                },
                transports={**TEXT, "type": "array", "items": TEXT, "maxItems": 8},
                require={**TEXT, "type": "boolean"},
                minPairMegabytesPerSecond={**TEXT, "type": "integer", "minimum": 0, "maximum": 10**7},
            ),
            _take_over_network,
        ),
    ),
)
