"""Build the pod template of the Job: the user's template, with the launcher before the training command.

Values of the user's template take precedence (a /dev/shm, a security context, a NCCL variable). The operator owns only
the fields with which pods connect to each other; ``template.py`` refuses templates that set them.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ddp_operator.api import child_names, constants
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.job import CRASH_LOOP_FAILURES, DDPTrainingJob, inherited_labels
from ddp_operator.api.kubeobjects import find_limits, parse_quantity
from ddp_operator.api.parts import PodAddition, call_if_asked
from ddp_operator.api.spec import Checkpoint
from ddp_operator.manifests.template import MAX_TEXT, ResolvedTemplate, measure_variable
from ddp_pod.contract.plan import (
    VERSION,
    CheckpointStoreConfig,
    PodPlan,
    encode_plan,
)

_DEFAULT_GRACE_SECONDS = 30
_DEFAULT_SNAPSHOTS = 3
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# Time for the launcher to write its termination message, after the workers' grace time.
_LAUNCHER_GRACE_SECONDS = 30


def build_pod_template(
    job: DDPTrainingJob, template: ResolvedTemplate, launcher_digest: str, *, attempt: int, nodes: int
) -> dict[str, Any]:
    """Return ``Job.spec.template`` of an attempt."""
    pod: dict[str, Any] = copy.deepcopy(dict(template.pod))
    metadata = build_pod_metadata(job, attempt, job.spec.template.metadata or {})
    pod["subdomain"] = child_names.service_name(job.name)
    pod.setdefault("terminationGracePeriodSeconds", _grace_seconds(job) + _LAUNCHER_GRACE_SECONDS)
    additions = _list_additions(job, template, attempt)
    _add_metadata_and_fields(metadata, pod, additions)

    if job.spec.recovery.avoid_failed_nodes and job.status.failed_nodes:
        avoid_nodes(pod, job.status.failed_nodes)

    trainer = pod["containers"][template.trainer_index]
    _build_trainer(trainer, job, template, additions, attempt=attempt, nodes=nodes, pod=pod)
    _add_volumes(pod, trainer, job, additions, launcher_digest)
    _add_init_containers(pod, additions)
    finish_pod(pod, job)
    return {"metadata": metadata, "spec": pod}


def _list_additions(job: DDPTrainingJob, template: ResolvedTemplate, attempt: int) -> list[PodAddition]:
    """Return what features add to the pod. Raises: InvalidManifest."""
    return [
        call_if_asked(part, job, partial(part.pod, job, template, attempt), PodAddition, PodAddition())
        for part in job.schema.parts
        if part.pod is not None
    ]


def _add_metadata_and_fields(metadata: dict[str, Any], pod: dict[str, Any], additions: Sequence[PodAddition]) -> None:
    for addition in additions:
        metadata["labels"] |= addition.labels
        metadata["annotations"] |= addition.annotations
        pod |= {name: copy.deepcopy(value) for name, value in addition.fields.items() if not pod.get(name)}
        pod |= copy.deepcopy(dict(addition.replaced))


def build_pod_metadata(job: DDPTrainingJob, attempt: int, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pods' metadata. ``written``: the template's metadata."""
    metadata = copy.deepcopy(dict(written))
    own = child_names.child_labels(job.name, attempt)
    metadata["labels"] = {**inherited_labels(job), **(metadata.get("labels") or {}), **own}
    kueue_annotations = {}
    if attempt:
        for key, value in job.annotations.items():
            if key.startswith(constants.KUEUE_POD_SET_PREFIX):
                kueue_annotations[key] = value
    metadata["annotations"] = {
        **dict(constants.MESH_PROXIES.values()),
        **kueue_annotations,
        **(metadata.get("annotations") or {}),
    }
    return metadata


def finish_pod(pod: dict[str, Any], job: DDPTrainingJob) -> None:
    """Set the fields that all pods of a job have."""
    pod["restartPolicy"] = "Never"
    if pod.get("hostNetwork") and pod.get("dnsPolicy") in (None, "ClusterFirst"):
        # Kubernetes would use the node's resolver, which cannot resolve the name of pod 0.
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    pod.setdefault("enableServiceLinks", False)
    pod.setdefault("automountServiceAccountToken", False)
    _secure_pod(pod, job.spec.security_profile)
    for container in [*pod["containers"], *(pod.get("initContainers") or [])]:
        _secure_container(container, job.spec.security_profile)
    _check_own_variables(pod)
    for container in pod.get("initContainers") or []:
        # The status then has the last lines of the log.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _check_own_variables(pod: Mapping[str, Any]) -> None:
    """Refuse a variable of the operator with which Linux starts no program; those of the template have been checked.

    Raises: InvalidManifest.
    """
    for container in (*pod["containers"], *(pod.get("initContainers") or ())):
        for variable in container.get("env") or ():
            size = measure_variable(variable)
            if size > MAX_TEXT:
                message = (
                    f"the operator's variable {variable['name']} would have {size:,} bytes, and Linux allows "
                    f"{MAX_TEXT:,}; shorten the options of torchrun, metrics.logPatterns and inputs"
                )
                raise InvalidManifest([FieldError("spec", message)])


def find_termination_path(container: Mapping[str, Any]) -> str:
    """Return where a container writes how it ends."""
    return container.get("terminationMessagePath") or "/dev/termination-log"


def build_launcher_mount() -> dict[str, Any]:
    """Return the mount of the launcher in a container."""
    return {"name": constants.LAUNCHER_VOLUME, "mountPath": constants.LAUNCHER_MOUNT_PATH, "readOnly": True}


def build_launcher_volume(digest: str) -> dict[str, Any]:
    """Return the volume with the launcher of a digest."""
    config_map = {"name": child_names.launcher_config_map_name(digest), "defaultMode": 0o444}
    return {"name": constants.LAUNCHER_VOLUME, "configMap": config_map}


def _build_trainer(
    trainer: dict[str, Any],
    job: DDPTrainingJob,
    template: ResolvedTemplate,
    additions: Sequence[PodAddition],
    *,
    attempt: int,
    nodes: int,
    pod: Mapping[str, Any],
) -> None:
    spec = job.spec
    launcher = f"{constants.LAUNCHER_MOUNT_PATH}/{constants.LAUNCHER_FILE}"
    trainer["command"] = [template.interpreter, launcher, "run"]
    trainer["args"] = ["--", *template.command.argv]
    plan = build_plan(job, template, attempt=attempt, nodes=nodes)
    required = _build_environment(job, template, plan, attempt=attempt, pod=pod)
    defaults = _build_default_environment(template)
    secrets: list[str] = []
    for addition in additions:
        required |= addition.variables
        defaults |= addition.defaults
        secrets += addition.secrets
    written = list(trainer.get("env") or [])
    written_names = {variable["name"] for variable in written}
    secret_name = child_names.rendezvous_secret_name(job.name, job.uid, job.nonce)
    secret_key = {"name": secret_name, "key": constants.RENDEZVOUS_KEY}
    # The user's variables are last, so that they can refer to the operator's: `$(MASTER_ADDR)`.
    trainer["env"] = [
        *({"name": name, "value": value} for name, value in required.items()),
        {"name": constants.ENV_POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": constants.ENV_RENDEZVOUS_SECRET, "valueFrom": {"secretKeyRef": secret_key}},
        *({"name": name, "value": value} for name, value in defaults.items() if name not in written_names),
        *written,
    ]
    if secrets:
        sources = [{"secretRef": {"name": name}} for name in secrets]
        trainer["envFrom"] = [*sources, *(trainer.get("envFrom") or [])]  # the last source takes precedence
    trainer["ports"] = [
        *(trainer.get("ports") or []),
        {"name": "rendezvous", "containerPort": spec.rendezvous.port},
        {"name": "metrics", "containerPort": spec.metrics.port},
    ]
    trainer.setdefault("terminationMessagePath", "/dev/termination-log")
    # The launcher writes the message, unless its Python does not start.
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if spec.checkpoint and spec.checkpoint.secret_ref:
        secret = {"secretRef": {"name": spec.checkpoint.secret_ref.name}}
        trainer["envFrom"] = [secret, *(trainer.get("envFrom") or [])]


def build_plan(job: DDPTrainingJob, template: ResolvedTemplate, *, attempt: int, nodes: int) -> PodPlan:
    """Return the plan of the pods of an attempt."""
    spec = job.spec
    elastic = spec.elastic
    is_elastic = elastic is not None and elastic.min_nodes < elastic.max_nodes
    saves = spec.checkpoint
    plan = PodPlan(
        version=VERSION,
        nodes=nodes,
        spares=job.spares,
        nproc_per_node=template.nproc,
        elastic=is_elastic,
        min_nodes=elastic.min_nodes if elastic is not None and is_elastic else 0,
        max_nodes=elastic.max_nodes if elastic is not None and is_elastic else 0,
        rendezvous_backend=spec.rendezvous.backend,
        pod_host=child_names.pod_host(job.name, attempt, "{}"),
        program=template.command.program,
        torchrun=template.command.options,
        in_place_restarts=job.in_place_restarts,
        # One fewer than the operator allows: the last restart gets new pods, in case the pods are the cause.
        restarts_without_progress=CRASH_LOOP_FAILURES - 2 if job.counts_in_place else None,
        join_timeout_seconds=spec.rendezvous.join_timeout_seconds,
        non_retryable_exit_codes=tuple(spec.recovery.non_retryable_exit_codes),
        success_policy=spec.success_policy,
        checkpoint=CheckpointStoreConfig(saves.url, saves.keep or _DEFAULT_SNAPSHOTS) if saves and saves.url else None,
        log_patterns=tuple(spec.metrics.log_patterns),
        auto_instrument=spec.metrics.auto_instrument,
        epochs=spec.metrics.epochs,
        warm_start=spec.recovery.warm_start != "Off",
    )
    for part in job.schema.parts:
        if part.plan is not None:
            plan = call_if_asked(part, job, partial(part.plan, job, plan), PodPlan, plan)
    return plan


def _build_environment(
    job: DDPTrainingJob, template: ResolvedTemplate, plan: PodPlan, *, attempt: int, pod: Mapping[str, Any]
) -> dict[str, str]:
    """Return the operator's variables, which docs/pod-contract.md lists."""
    spec = job.spec
    env = {
        constants.ENV_JOB_NAME: job.name,
        constants.ENV_JOB_NAMESPACE: job.namespace,
        constants.ENV_RUN_ID: f"{job.uid}-{attempt}",
        constants.ENV_ATTEMPT: str(attempt),
        constants.ENV_MASTER_ADDR: child_names.pod_host(job.name, attempt, 0),
        constants.ENV_MASTER_PORT: str(spec.rendezvous.port),
        constants.ENV_METRICS_PORT: str(spec.metrics.port),
        constants.ENV_GRACE_SECONDS: str(_workers_grace(job, pod)),
        constants.ENV_TERMINATION_LOG: find_termination_path(template.trainer),
        # Kubernetes expands $(NAME) and $$ in a variable's value.
        constants.ENV_LAUNCHER_CONFIG: encode_plan(plan).replace("$", "$$"),
    }
    if spec.checkpoint:
        env[constants.ENV_CHECKPOINT_DIR] = spec.checkpoint.path
    return env


def _build_default_environment(template: ResolvedTemplate) -> dict[str, str]:
    """Return the variables that the user's template may override."""
    env = {"PYTHONUNBUFFERED": "1"}
    cpus = parse_quantity(template.limits.get("cpu"))
    if cpus is not None:
        # With more threads than CPUs training is 2.5 to 12 times slower; torchrun's default of 1 leaves cores idle.
        env[constants.ENV_OMP_NUM_THREADS] = str(max(1, int(cpus / template.nproc)))
    return env


def _grace_seconds(job: DDPTrainingJob) -> int:
    return job.spec.checkpoint.grace_seconds if job.spec.checkpoint else _DEFAULT_GRACE_SECONDS


def _workers_grace(job: DDPTrainingJob, pod: Mapping[str, Any]) -> int:
    """Return the workers' grace time, which the template's terminationGracePeriodSeconds may shorten."""
    total = pod.get("terminationGracePeriodSeconds")
    if not isinstance(total, int):
        return _grace_seconds(job)
    return max(0, min(_grace_seconds(job), total - min(_LAUNCHER_GRACE_SECONDS, total // 4)))


def _add_volumes(
    pod: dict[str, Any],
    trainer: dict[str, Any],
    job: DDPTrainingJob,
    additions: Sequence[PodAddition],
    launcher_digest: str,
) -> None:
    volumes = list(pod.get("volumes") or [])
    mounts = list(trainer.get("volumeMounts") or [])
    mounted = {mount["mountPath"].rstrip("/") for mount in mounts}

    volumes.append(build_launcher_volume(launcher_digest))
    mounts.append(build_launcher_mount())
    if "/dev/shm" not in mounted:
        shared_memory = {"medium": "Memory"}
        size_limit = _size_shared_memory(job.spec.shared_memory, find_limits(pod, trainer).get("memory"))
        if size_limit:
            shared_memory["sizeLimit"] = size_limit
        volumes.append({"name": constants.SHM_VOLUME, "emptyDir": shared_memory})
        mounts.append({"name": constants.SHM_VOLUME, "mountPath": "/dev/shm"})
    checkpoint = job.spec.checkpoint
    if checkpoint and checkpoint.path.rstrip("/") not in mounted:
        volume, mount = build_checkpoint_volume(checkpoint)
        volumes.append(volume)
        mounts.append(mount)
    for addition in additions:
        if addition.working_dir:
            trainer.setdefault("workingDir", addition.working_dir)
        volumes += map(dict, addition.volumes)
        mounts += map(dict, addition.mounts)
    pod["volumes"] = volumes
    trainer["volumeMounts"] = mounts


def _size_shared_memory(written: str | None, limit: Any) -> str | None:
    """Return the size of /dev/shm as a quantity; None: it has no limit of its own. ``limit``: of the memory."""
    if written is None or not written.endswith("%"):
        return written
    memory = parse_quantity(limit)
    return None if memory is None else str(int(memory * int(written[:-1]) / 100))


def _add_init_containers(pod: dict[str, Any], additions: Sequence[PodAddition]) -> None:
    added = [
        {**container, "volumeMounts": [*(container.get("volumeMounts") or ()), build_launcher_mount()]}
        for addition in additions
        for container in addition.init_containers
    ]
    if added:
        pod["initContainers"] = [*added, *(pod.get("initContainers") or [])]


def build_checkpoint_volume(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the operator's volume at the checkpoint folder, and its mount."""
    claim = checkpoint.claim_name
    source = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    mount = {"name": constants.CHECKPOINT_VOLUME, "mountPath": checkpoint.path}
    return {"name": constants.CHECKPOINT_VOLUME, **source}, mount


def avoid_nodes(pod: dict[str, Any], nodes: Sequence[str]) -> None:
    """Exclude nodes in the pod's node affinity, in each term of the user, because terms are alternatives."""
    exclusions = _build_exclusions(nodes)
    affinity = pod.get("affinity") or {}
    node = affinity.get("nodeAffinity") or {}
    required = node.get(_REQUIRED) or {}
    terms = []
    for term in required.get("nodeSelectorTerms") or [{}]:
        fields = term.get("matchFields") or []
        terms.append({**term, "matchFields": [*fields, *(item for item in exclusions if item not in fields)]})
    pod["affinity"] = {**affinity, "nodeAffinity": {**node, _REQUIRED: {**required, "nodeSelectorTerms": terms}}}


def readmit_nodes(pod: dict[str, Any], nodes: Sequence[str]) -> None:
    """Remove what ``avoid_nodes`` has added for these nodes, which were used: so the user does not exclude them."""
    exclusions = _build_exclusions(nodes)
    affinity = pod.get("affinity") or {}
    node = affinity.get("nodeAffinity") or {}
    required = node.get(_REQUIRED) or {}
    terms = []
    for term in required.get("nodeSelectorTerms") or []:
        fields = [item for item in term.get("matchFields") or [] if item not in exclusions]
        others = {key: value for key, value in term.items() if key != "matchFields"}
        terms.append(others | ({"matchFields": fields} if fields else {}))
    if any(terms):
        pod["affinity"] = {**affinity, "nodeAffinity": {**node, _REQUIRED: {**required, "nodeSelectorTerms": terms}}}
    elif terms:  # a term without requirements would match no node
        pod["affinity"] = {**affinity, "nodeAffinity": {key: node[key] for key in node if key != _REQUIRED}}


def _build_exclusions(nodes: Sequence[str]) -> list[dict[str, Any]]:
    # A matchFields requirement has one value. The label kubernetes.io/hostname may differ from the node's name.
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in nodes]


def _secure_pod(pod: dict[str, Any], profile: str) -> None:
    context = dict(pod.get("securityContext") or {})
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if profile == "Restricted":
        context.setdefault("runAsNonRoot", True)
    pod["securityContext"] = context


def _secure_container(container: dict[str, Any], profile: str) -> None:
    context = dict(container.get("securityContext") or {})
    capabilities = (context.get("capabilities") or {}).get("add") or []
    if not context.get("privileged") and not {"SYS_ADMIN", "CAP_SYS_ADMIN"} & {*map(str, capabilities)}:
        context.setdefault("allowPrivilegeEscalation", False)
    if profile == "Restricted":
        context.setdefault("capabilities", {"drop": ["ALL"]})
    container["securityContext"] = context
