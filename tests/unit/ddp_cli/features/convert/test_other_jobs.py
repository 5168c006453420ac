"""Advice on jobs of other operators, from their fields."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ddp_cli.features.convert.other_jobs import explain_other_kind

Object = dict[str, Any]

TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tune}
spec:
  runtimeRef: {name: torch-distributed}
  initializer:
    dataset: {storageUri: "hf://org/dataset", secretRef: {name: hf-token}}
    model: {storageUri: "s3://bucket/model"}
  trainer: {numNodes: 2, numProcPerNode: 4, command: [torchrun, train.py]}
  runtimePatches: [{manager: team}]
"""
JOB_SET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: islands, annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: rack}}
spec:
  failurePolicy: {maxRestarts: 5}
  startupPolicy: {startupPolicyOrder: InOrder}
  replicatedJobs:
    - {name: coordinator, template: {spec: {template: {}}}}
    - {name: workers, replicas: 2, template: {spec: {parallelism: 4}}}
"""
MPI_JOB = """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: ds}
spec:
  slotsPerWorker: 8
  runPolicy: {cleanPodPolicy: Running, backoffLimit: 2}
  mpiReplicaSpecs: {Launcher: {replicas: 1}, Worker: {replicas: 3}}
"""
VOLCANO_JOB = """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: v}
spec: {queue: research, maxRetry: 4, tasks: [{name: master, replicas: 1}, {name: worker, replicas: 3}, {name: one}]}
"""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (TRAIN_JOB, [
            "TrainJob tune is not converted", "spec.nodes is trainer.numNodes (2)",
            "spec.procPerNode is trainer.numProcPerNode (4)", "is in the runtime (torch-distributed)",
            "initializer.dataset (hf://org/dataset) is the url of an entry of spec.inputs, and its secretRef",
            "initializer.model (s3://bucket/model) is the url of an entry of spec.inputs;",
            "runtimePatches (nodeSelector, tolerations, volumes, ...) belong to spec.template",
        ]),
        (JOB_SET, [
            "JobSet islands is not converted",
            "spec.nodes is 8: replicas x parallelism (2 x 4) of the replicated job (workers)",
            "another task (1: replicas x parallelism (1 x 1) of the replicated job (coordinator)) is a job of its own",
            "failurePolicy.maxRestarts (5) is spec.recovery.maxRestarts", "startupPolicy has no equivalent",
            "exclusive-topology (rack) is spec.scheduling.placement: Pack",
        ]),
        (MPI_JOB, [
            "MPIJob ds is not converted", "spec.nodes is the replicas of the workers (3)",
            "spec.procPerNode is slotsPerWorker (8)", "runPolicy.cleanPodPolicy (Running) is spec.cleanPodPolicy",
            "runPolicy.backoffLimit (2) is spec.recovery.maxRestarts",
        ]),
        (VOLCANO_JOB, [
            "Job v is not converted", "the replicas of all tasks (5)", "queue (research) is spec.scheduling.queue",
            "maxRetry (4) is spec.recovery.maxRestarts",
        ]),
    ],
    ids=["TrainJob", "JobSet", "MPIJob", "Volcano"],
)  # fmt: skip
def test_advice_has_the_numbers_of_the_job(text: str, parts: list[str]) -> None:
    advice = explain_other_kind(yaml.safe_load(text))
    for part in parts:
        assert part in advice


@pytest.mark.parametrize("spec", [None, [], "x", {"replicatedJobs": 3}, {"replicatedJobs": [None, {"template": []}]}])
@pytest.mark.parametrize("kind", ["TrainJob", "JobSet", "MPIJob", "RayJob"])
def test_job_of_odd_structure_gets_general_advice(kind: str, spec: Any) -> None:
    assert "write a DDPTrainingJob: " in explain_other_kind({"apiVersion": "x/v1", "kind": kind, "spec": spec})


@pytest.mark.parametrize("kind", ["ConfigMap", "Job", "PyTorchJob"])
def test_object_without_a_training_job_gets_no_advice(kind: str) -> None:
    assert explain_other_kind({"apiVersion": "batch/v1", "kind": kind}) == ""
