"""Typical PyTorchJobs become DDPTrainingJobs that `ddp render` accepts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.client.validation import check_manifest
from ddp_cli.features.convert.pytorchjob import convert
from ddp_operator.api.errors import InvalidManifest

Object = dict[str, Any]

MNIST = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: pytorch-mnist
  namespace: kubeflow
  annotations: {kubectl.kubernetes.io/last-applied-configuration: "{}"}
spec:
  pytorchReplicaSpecs:
    Master: &pod
      replicas: 1
      restartPolicy: OnFailure
      template:
        metadata: {annotations: {sidecar.istio.io/inject: "false"}}
        spec:
          containers:
            - name: pytorch
              image: docker.io/kubeflowkatib/pytorch-mnist:v1beta1-45c5727
              imagePullPolicy: Always
              command: [python3, /opt/pytorch-mnist/mnist.py, --epochs=1]
              ports: [{containerPort: 23456, name: pytorchjob-port}]
    Worker: *pod
"""

ELASTIC = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: elastic-imagenet}
spec:
  elasticPolicy:
    rdzvBackend: etcd
    rdzvHost: etcd-service
    rdzvPort: 2379
    minReplicas: 1
    maxReplicas: 2
    maxRestarts: 100
    rdzvConf: [{key: join_timeout, value: "900"}, {key: last_call_timeout, value: "60"}]
    metrics: [{type: Resource, resource: {name: cpu}}]
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: kubeflow/pytorch-elastic-example-imagenet:1.0.0-sigterm
              env:
                - {name: LOGLEVEL, value: DEBUG}
                - {name: RDZV_ENDPOINT, value: "etcd:2379"}
                - {name: PET_NNODES, value: "2"}
              command: [python, -m, torch.distributed.run, --rdzv_backend=c10d, --max-restarts, "3"]
              args: [/workspace/imagenet.py, --arch=resnet18]
              resources: {limits: {nvidia.com/gpu: 1}}
"""

LLM = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llama-finetune, labels: {team: nlp}}
spec:
  nprocPerNode: "8"
  runPolicy:
    cleanPodPolicy: None
    ttlSecondsAfterFinished: 86400
    activeDeadlineSeconds: 259200
    backoffLimit: 3
    suspend: false
    schedulingPolicy: {queue: research, minAvailable: 4, priorityClass: high}
  pytorchReplicaSpecs:
    Master: &pod
      replicas: 1
      restartPolicy: ExitCode
      template:
        spec:
          containers:
            - name: pytorch
              image: registry.example.com/llm:2.3
              command: [bash, -c]
              args:
                - |
                  torchrun --nnodes=$PET_NNODES --nproc_per_node=8 --rdzv_id $PET_RDZV_ID \\
                    --rdzv_backend=c10d --rdzv_endpoint=${MASTER_ADDR}:${MASTER_PORT} finetune.py --config cfg.yaml
              env: [{name: NCCL_DEBUG, value: INFO}, {name: WORLD_SIZE, value: "32"}]
              resources: {limits: {nvidia.com/gpu: 8, cpu: "64", memory: 512Gi}}
              volumeMounts: [{name: dshm, mountPath: /dev/shm}, {name: data, mountPath: /data}]
            - {name: tensorboard, image: "tensorboard:2"}
          volumes:
            - {name: dshm, emptyDir: {medium: Memory, sizeLimit: 64Gi}}
            - {name: data, persistentVolumeClaim: {claimName: data}}
          restartPolicy: OnFailure
    Worker:
      <<: *pod
      replicas: 3
"""


def converted(text: str) -> tuple[Object, str]:
    """Return the spec and the notes of a conversion that `ddp render` accepts."""
    done = convert(yaml.safe_load(text))
    check_manifest(done.write())
    return done.resource["spec"], "\n".join(done.notes)


def trainer(spec: Object) -> Object:
    result: Object = next(c for c in spec["template"]["spec"]["containers"] if c["name"] == "trainer")
    return result


def change(text: str, edit: Any) -> str:
    document = json.loads(json.dumps(yaml.safe_load(text)))  # both roles of an anchor become independent
    edit(document)
    return yaml.safe_dump(document)


class TestManifests:
    def test_master_and_worker_become_two_nodes(self) -> None:
        spec, notes = converted(MNIST)
        assert (spec["nodes"], spec["procPerNode"]) == (2, 1)
        assert trainer(spec)["command"] == ["python3", "/opt/pytorch-mnist/mnist.py", "--epochs=1"]
        assert "ports" not in trainer(spec)
        assert spec["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        assert "one process per pod" in notes

    def test_elastic_job_uses_c10d_and_notes_other_fields(self) -> None:
        spec, notes = converted(ELASTIC)
        assert spec["nodes"] == 2
        assert spec["elastic"] == {"minNodes": 1, "maxNodes": 2}
        assert spec["recovery"] == {"inPlaceRestarts": 100}
        assert spec["rendezvous"] == {"port": 2379, "joinTimeoutSeconds": 900}
        assert trainer(spec)["command"] == [
            "python",
            "-m",
            "torch.distributed.run",
            "/workspace/imagenet.py",
            "--arch=resnet18",
        ]
        assert [entry["name"] for entry in trainer(spec)["env"]] == ["LOGLEVEL", "RDZV_ENDPOINT"]
        for words in (
            "etcd: replaced by c10d",
            "last_call_timeout=60",
            "HorizontalPodAutoscaler",
            "PET_NNODES",
            "rdzvHost",
        ):
            assert words in notes

    def test_torchrun_in_shell_becomes_command(self) -> None:
        assert convert(yaml.safe_load(LLM)).resource["metadata"]["labels"] == {
            "team": "nlp",
            "kueue.x-k8s.io/queue-name": "research",
        }
        spec, notes = converted(LLM)
        assert (spec["nodes"], spec["procPerNode"]) == (4, 8)
        assert trainer(spec)["command"] == ["torchrun", "finetune.py", "--config", "cfg.yaml"]
        assert "args" not in trainer(spec)
        assert spec["recovery"] == {"nonRetryableExitCodes": [1, 2, 126, 127], "maxRestarts": 3}
        assert (spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"], spec["suspend"]) == (
            86400,
            259200,
            False,
        )
        assert (spec["cleanPodPolicy"], spec["sharedMemory"]) == ("None", "64Gi")
        assert [volume["name"] for volume in spec["template"]["spec"]["volumes"]] == ["data"]
        (sidecar,) = spec["template"]["spec"]["initContainers"]
        assert (sidecar["name"], sidecar["restartPolicy"]) == ("tensorboard", "Always")
        assert spec["template"]["spec"]["priorityClassName"] == "high"
        for words in ("minAvailable", "spec.checkpoint", "WORLD_SIZE", "--nnodes, --nproc-per-node", "native sidecar"):
            assert words in notes


class TestDetails:
    @pytest.mark.parametrize(
        ("document", "words"),
        [
            ({"kind": "Job", "apiVersion": "batch/v1"}, "found batch/v1 Job"),
            ({"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1", "spec": {}}, "must have a Master or a Worker"),
            (
                {
                    "kind": "PyTorchJob",
                    "apiVersion": "kubeflow.org/v1",
                    "spec": {"pytorchReplicaSpecs": {"Worker": {}}},
                },
                "Worker.template.spec.containers: Required value",
            ),
            (
                {"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1", "spec": {"pytorchReplicaSpecs": {"Worker": 3}}},
                "does not have the structure of a PyTorchJob",
            ),
        ],
    )
    def test_invalid_pytorchjob_is_refused(self, document: Object, words: str) -> None:
        with pytest.raises(InvalidManifest) as refused:
            convert(document)
        assert words in str(refused.value)


def with_container(**members: Any) -> str:
    """Return a job whose pods have these members of the container, without those that are None."""

    def edit(document: Object) -> None:
        for replica in document["spec"]["pytorchReplicaSpecs"].values():
            container = replica["template"]["spec"]["containers"][0]
            container.update(members)
            for name in [name for name in container if container[name] is None]:
                del container[name]

    return change(MNIST, edit)


class TestLaunchers:
    @pytest.mark.parametrize(
        ("command", "expected", "procs"),
        [
            ("bash -c 'exec torchrun --nproc_per_node=2 t.py'", ["torchrun", "t.py"], 2),
            ("torchrun --no-python --nnodes=2 ./train --x", ["./train", "--x"], None),
            ("torchrun --run-path --shutdown-timeout 9 train.py", ["torchrun", "train.py"], None),
            ("torchrun --tee 3 --nnodes 2 t.py --nnodes 2", ["torchrun", "--tee", "3", "t.py", "--nnodes", "2"], None),
            ("python -m torch.distributed.launch --use_env --nproc_per_node=8 -m pkg.train",
             ["python", "-m", "torch.distributed.launch", "--use_env", "-m", "pkg.train"], 8),
        ],
    )  # fmt: skip
    def test_launcher_in_command_is_left_out(self, command: str, expected: list[str], procs: Any) -> None:
        spec, notes = converted(with_container(command=shlex.split(command)))
        assert trainer(spec)["command"] == expected
        assert spec.get("procPerNode") == procs
        assert "left out, the operator " in notes or "--no-python" in command
        assert "does not run torchrun" not in notes

    @pytest.mark.parametrize(
        ("command", "program"),
        [
            (["bash", "-lc", "cd /app && torchrun --nproc_per_node=8 t.py"], "a shell"),
            (["bash", "-c", "torchrun --nnodes=$N t.py --lr $LR"], "a shell"),
            (["accelerate", "launch", "t.py"], "accelerate"),
            (["env", "A=1", "torchrun", "t.py"], "env"),
        ],
    )
    def test_program_that_may_be_a_launcher_is_kept_and_noted(self, command: list[str], program: str) -> None:
        spec, notes = converted(with_container(command=command))
        assert trainer(spec)["command"] == command
        assert f"{program} starts the training; if it runs torchrun or another launcher, write the script" in notes

    def test_set_up_and_variables_of_each_rank_are_noted(self) -> None:
        def edit(document: Object) -> None:
            document["spec"]["nprocPerNode"] = "4"

        line = "git clone x; mkdir -p y; [ -f z ] || wget z; python t.py --rank $RANK"
        _, notes = converted(change(with_container(command=["bash", "-c", line]), edit))
        assert "runs once in each rank now: move set-up to an init container" in notes
        assert "a shell starts the training" in notes
        assert "GROUP_RANK and GROUP_WORLD_SIZE count pods" in notes
        assert "runs once in each rank" not in converted(with_container(command=["bash", "-c", line]))[1]


class TestFields:
    @pytest.mark.parametrize(
        ("more", "initial", "kept"),
        [
            ([], [], False),
            ([{"name": "dshm", "mountPath": "/ramdisk"}], [], True),
            ([], [{"name": "warm", "image": "b:1", "volumeMounts": [{"name": "dshm", "mountPath": "/cache"}]}], True),
        ],
    )
    def test_shared_memory_that_is_mounted_twice_is_kept(self, more: Any, initial: Any, kept: bool) -> None:
        def edit(document: Object) -> None:
            for replica in document["spec"]["pytorchReplicaSpecs"].values():
                pod = replica["template"]["spec"]
                pod["volumes"] = [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]
                pod["containers"][0]["volumeMounts"] = [{"name": "dshm", "mountPath": "/dev/shm"}, *more]
                pod["initContainers"] = initial

        spec, _ = converted(change(MNIST, edit))
        assert ("volumes" in spec["template"]["spec"]) is kept

    def test_labels_of_training_operator_are_replaced_or_noted(self) -> None:
        field = "metadata.labels['training.kubeflow.org/{}']"
        env = [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field.format(label)}}}
            for name, label in (("INDEX", "replica-index"), ("ROLE", "replica-type"))
        ]
        spec, notes = converted(with_container(env=env))
        path = trainer(spec)["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == "metadata.labels['batch.kubernetes.io/job-completion-index']"
        assert "training.kubeflow.org/replica-index is batch.kubernetes.io/job-completion-index now" in notes
        assert "refers to the label training.kubeflow.org/replica-type" in notes

    def test_every_other_field_is_noted(self) -> None:
        def edit(document: Object) -> None:
            document["metadata"] |= {"finalizers": ["x/y"], "uid": "1", "ownerReferences": [{"name": "x"}]}
            document["status"] = {"conditions": []}
            spec = document["spec"]
            spec["futureThing"] = 1
            spec["elasticPolicy"] = {"rdzvPort": 80, "futureA": 1}
            pod = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
            pod["containers"][0]["resources"] = {"limits": {"memory": "1Gi"}}
            spec["runPolicy"] = {"managedBy": "x", "futureB": 1, "schedulingPolicy": {"futureC": 1}}
            spec["pytorchReplicaSpecs"]["Launcher"] = {"replicas": 3}
            spec["pytorchReplicaSpecs"]["Worker"] |= {"futureD": 1}
            metadata = spec["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]
            metadata |= {"name": "x", "creationTimestamp": None, "labels": {"app.kubernetes.io/managed-by": "Helm"}}

        spec, notes = converted(change(MNIST, edit))
        assert spec["nodes"] == 2
        assert set(spec["template"]["metadata"]) == {"labels", "annotations"}
        for field in (
            "spec.futureThing", "spec.pytorchReplicaSpecs.Master.template.spec.containers[0].resources",
            "metadata.finalizers", "metadata.ownerReferences", "spec.elasticPolicy.rdzvPort",
            "spec.elasticPolicy.futureA", "spec.runPolicy.managedBy", "spec.runPolicy.futureB",
            "spec.runPolicy.schedulingPolicy.futureC", "spec.pytorchReplicaSpecs.Launcher",
            "spec.pytorchReplicaSpecs.Worker.futureD", "template.metadata.name",
        ):  # fmt: skip
            assert f"{field}: " in notes
        assert "uid" not in notes

    @pytest.mark.parametrize(
        ("old", "new", "names"),
        [
            ("replicas: 1", "replicas: $N", "$N"),
            ("name: pytorch-mnist", "name: ${JOB}-1", "${JOB}"),
            ("v1beta1-45c5727", "{{ .Values.tag }}", "{{ .Values.tag }}"),
        ],
    )
    def test_template_with_variables_is_refused(self, old: str, new: str, names: str) -> None:
        with pytest.raises(InvalidManifest, match=r"is a template with variables") as refused:
            convert(yaml.safe_load(MNIST.replace(old, new)))
        assert names in str(refused.value)


PLACEHOLDER = {"spec": {"containers": [{"name": "pytorch", "image": "empty:0", "command": ["sleep", "infinity"]}]}}


class TestRolesAndQueues:
    @pytest.mark.parametrize(("empty", "kept"), [("Worker", "Master"), ("Master", "Worker")])
    def test_role_without_replicas_is_left_out(self, empty: str, kept: str) -> None:
        def edit(document: Object) -> None:
            roles = document["spec"]["pytorchReplicaSpecs"]
            roles[empty] = {"replicas": 0, "restartPolicy": "Never", "template": PLACEHOLDER}
            roles[kept]["replicas"] = 4 if kept == "Worker" else None

        spec, notes = converted(change(MNIST, edit))
        assert spec["nodes"] == (4 if kept == "Worker" else 1)
        assert trainer(spec)["command"][0] == "python3"
        assert f"spec.pytorchReplicaSpecs.{empty}: left out, it has no replicas" in notes
        assert "recovery" not in spec
        assert "differs" not in notes

    def test_job_without_replicas_is_refused(self) -> None:
        def edit(document: Object) -> None:
            for role in document["spec"]["pytorchReplicaSpecs"].values():
                role["replicas"] = 0

        with pytest.raises(InvalidManifest, match="with at least one replica"):
            convert(yaml.safe_load(change(MNIST, edit)))

    @pytest.mark.parametrize(
        ("controller", "managed_by", "noted"),
        [
            ("kueue.x-k8s.io/multikueue", "kueue.x-k8s.io/multikueue", False),
            ("kubeflow.org/training-operator", None, False),
            ("example.com/other", None, True),
        ],
    )
    def test_controller_is_kept_if_it_knows_the_new_kind(
        self, controller: str, managed_by: str | None, noted: bool
    ) -> None:
        def edit(document: Object) -> None:
            document["spec"]["runPolicy"] = {"managedBy": controller}

        spec, notes = converted(change(MNIST, edit))
        assert spec.get("managedBy") == managed_by
        assert ("spec.runPolicy.managedBy" in notes) is noted

    @pytest.mark.parametrize("is_queued", [True, False])
    def test_suspension_by_kueue_is_left_out(self, is_queued: bool) -> None:
        def edit(document: Object) -> None:
            document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"} if is_queued else {}
            document["spec"]["runPolicy"] = {"suspend": True}

        spec, notes = converted(change(MNIST, edit))
        assert spec.get("suspend") == (None if is_queued else True)
        assert ("left out: Kueue sets it" in notes) is is_queued

    @pytest.mark.parametrize(
        ("scheduler", "scheduling"),
        [
            ("volcano", {"gang": "Volcano", "queue": "research"}),
            ("scheduler-plugins-scheduler", {"gang": "Coscheduling"}),
            ("own-scheduler", None),
        ],
    )
    def test_scheduler_of_gangs_becomes_a_gang(self, scheduler: str, scheduling: Object | None) -> None:
        def edit(document: Object) -> None:
            document["spec"]["runPolicy"] = {"schedulingPolicy": {"queue": "research"}}
            for role in document["spec"]["pytorchReplicaSpecs"].values():
                role["template"]["spec"]["schedulerName"] = scheduler

        done = convert(yaml.safe_load(change(MNIST, edit)))
        spec = done.resource["spec"]
        assert spec.get("scheduling") == scheduling
        assert spec["template"]["spec"].get("schedulerName") == (None if scheduling else scheduler)
        assert ("labels" in done.resource["metadata"]) is (scheduler != "volcano")


class TestConvertedCommand:
    @pytest.mark.parametrize(
        ("kind", "advice"),
        [
            ("trainer.kubeflow.org/v1alpha1 TrainJob", "spec.nodes is trainer.numNodes"),
            ("batch.volcano.sh/v1alpha1 Job", "spec.scheduling.gang: Volcano"),
            ("kubeflow.org/v2beta1 MPIJob", "there is no launcher pod"),
            ("batch/v1 Job", "found: Job"),
        ],
    )
    def test_job_of_other_kind_is_refused_by_its_kind(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, advice: str
    ) -> None:
        version, _, name = kind.partition(" ")
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump({"apiVersion": version, "kind": name, "metadata": {"name": "x"}}))
        assert main(["convert", str(path)]) == 2
        assert advice in capsys.readouterr().err
        path.write_text(f"{path.read_text()}---\n{MNIST}")
        assert main(["convert", str(path)]) == (0 if kind == "batch/v1 Job" else 1)

    def test_missing_command_exits_with_1_and_is_reported(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def edit(document: Object) -> None:
            for replica in document["spec"]["pytorchReplicaSpecs"].values():
                del replica["template"]["spec"]["containers"][0]["command"]

        path = tmp_path / "job.yaml"
        path.write_text(change(MNIST, edit))
        assert main(["convert", str(path)]) == 1
        shown = capsys.readouterr()
        assert "neither command nor args" in shown.err
        assert "# Differences" in shown.out

    @pytest.mark.parametrize(
        "text",
        [
            "kind: Job\n",
            "kind: [",
            "",
            pytest.param(f"{MNIST}\nkind: PyTorchJob\n", id="a key given twice"),
            pytest.param("[" * 5000, id="too deep"),
        ],
    )
    def test_file_without_pytorchjob_is_refused(
        self, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        assert main(["convert", str(path)]) == 2
        assert capsys.readouterr().err.startswith("ddp convert: refused\n")
