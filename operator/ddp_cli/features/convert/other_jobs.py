"""What to write instead of a training job of another operator, from the fields of that job. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_EXCLUSIVE_TOPOLOGY: Final = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def explain_other_kind(document: Mapping[str, Any]) -> str:
    """Return what to write instead of a training job of another kind; empty for any other object."""
    version = str(document.get("apiVersion"))
    kind = str(document.get("kind"))
    advise = _ADVICE.get(kind) or _ADVICE.get(f"{version.partition('/')[0]} {kind}")
    if advise is None:
        return ""
    name = _member(document, "metadata").get("name", "")
    advice = "; ".join(advise(document))
    return f"{version} {kind} {name} is not converted; write a DDPTrainingJob: {advice} (docs/comparison.md)"


def _advise_on_train_job(document: Mapping[str, Any]) -> Iterator[str]:
    spec = _member(document, "spec")
    trainer = _member(spec, "trainer")
    yield f"spec.nodes is trainer.numNodes{_show(trainer, 'numNodes')}"
    yield f"spec.procPerNode is trainer.numProcPerNode{_show(trainer, 'numProcPerNode')}"
    yield "image, command, args, env and resources of the trainer belong to the container in spec.template"
    if not trainer.get("image"):
        runtime = _show(_member(spec, "runtimeRef"), "name")
        yield f"the image, and all that the trainer does not set, is in the runtime{runtime}: read it there"
    initializer = _member(spec, "initializer")
    for role in ("dataset", "model"):
        source = _member(initializer, role)
        secret = ", and its secretRef is the secretRef there" if source.get("secretRef") else ""
        if source:
            yield f"initializer.{role}{_show(source, 'storageUri')} is the url of an entry of spec.inputs{secret}"
    for name in ("runtimePatches", "podTemplateOverrides"):
        if spec.get(name):
            yield f"{name} (nodeSelector, tolerations, volumes, ...) belong to spec.template"


def _advise_on_job_set(document: Mapping[str, Any]) -> Iterator[str]:
    spec = _member(document, "spec")
    jobs = sorted(map(_ReplicatedJob, _items(spec, "replicatedJobs")), key=lambda job: -job.pods)
    for job in jobs[:1] or [_ReplicatedJob({})]:
        yield f"spec.nodes is {job.describe()}, and its pod template is spec.template"
    for job in jobs[1:]:
        yield f"a replicated job with another task ({job.describe()}) is a job of its own, or a part of pod 0's script"
    failure_policy = _member(spec, "failurePolicy")
    if "maxRestarts" in failure_policy:
        yield f"failurePolicy.maxRestarts{_show(failure_policy, 'maxRestarts')} is spec.recovery.maxRestarts"
    if spec.get("startupPolicy"):
        yield "startupPolicy has no equivalent: all pods wait for each other in the rendezvous"
    annotations = _member(_member(document, "metadata"), "annotations")
    if _EXCLUSIVE_TOPOLOGY in annotations:
        domain = _show(annotations, _EXCLUSIVE_TOPOLOGY)
        yield (
            f"the annotation {_EXCLUSIVE_TOPOLOGY}{domain} is spec.scheduling.placement: Pack with topologyKey, or "
            "kueue.x-k8s.io/podset-required-topology in spec.template.metadata.annotations"
        )


class _ReplicatedJob:
    """The name and the pods of an entry of a JobSet."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        job = _member(_member(entry, "template"), "spec")
        self._name = _show(entry, "name")
        self._replicas = _count(entry, "replicas")
        self._parallelism = _count(job, "parallelism")
        self.pods = self._replicas * self._parallelism

    def describe(self) -> str:
        """Return the number of pods with its factors."""
        factors = f"{self._replicas} x {self._parallelism}"
        return f"{self.pods}: replicas x parallelism ({factors}) of the replicated job{self._name}"


def _advise_on_mpi_job(document: Mapping[str, Any]) -> Iterator[str]:
    spec = _member(document, "spec")
    workers = _member(_member(spec, "mpiReplicaSpecs"), "Worker")
    yield f"spec.nodes is the replicas of the workers{_show(workers, 'replicas')}, and their template is spec.template"
    yield f"spec.procPerNode is slotsPerWorker{_show(spec, 'slotsPerWorker')}"
    yield "the program that mpirun starts is the command; there is no launcher pod"
    policy = _member(spec, "runPolicy")
    fields = {"cleanPodPolicy": "spec.cleanPodPolicy", "backoffLimit": "spec.recovery.maxRestarts"}
    for name, field in fields.items():
        if name in policy:
            yield f"runPolicy.{name}{_show(policy, name)} is {field}"


def _advise_on_volcano_job(document: Mapping[str, Any]) -> Iterator[str]:
    spec = _member(document, "spec")
    tasks = _items(spec, "tasks")
    total = f" ({sum(_count(task, 'replicas') for task in tasks)})" if tasks else ""
    yield f"spec.nodes is the replicas of all tasks{total}, and the template of the worker is spec.template"
    yield f"queue{_show(spec, 'queue')} is spec.scheduling.queue with spec.scheduling.gang: Volcano"
    if "maxRetry" in spec:
        yield f"maxRetry{_show(spec, 'maxRetry')} is spec.recovery.maxRestarts"


def _advise_on_ray_job(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"the script of the entrypoint{_show(_member(document, 'spec'), 'entrypoint')} is the command"
    yield "ranks are started by torchrun, not by Ray"


_ADVICE: Final[dict[str, Callable[[Mapping[str, Any]], Iterator[str]]]] = {
    "TrainJob": _advise_on_train_job,
    "batch.volcano.sh Job": _advise_on_volcano_job,
    "MPIJob": _advise_on_mpi_job,
    "JobSet": _advise_on_job_set,
    "RayJob": _advise_on_ray_job,
}


def _member(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    member = value.get(name)
    return member if isinstance(member, Mapping) else {}


def _items(value: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    items = value.get(name)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _count(value: Mapping[str, Any], name: str) -> int:
    """Return a number of Kubernetes that is 1 by default."""
    number = value.get(name)
    return number if isinstance(number, int) else 1


def _show(value: Mapping[str, Any], name: str) -> str:
    """Return a value to insert after its name; empty if it is not set."""
    return f" ({value[name]})" if isinstance(value.get(name), str | int) else ""
