"""Typical PyTorchJobs become DDPTrainingJobs that `ddp render` accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.cli import main
from ddp_operator.cli.pytorchjob import convert
from ddp_operator.client.validation import check_manifest

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
    Master:
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
    Worker:
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
    document = yaml.safe_load(text)
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

    def test_name_and_namespace_are_kept_without_kubectl_annotation(self) -> None:
        metadata = convert(yaml.safe_load(MNIST)).resource["metadata"]
        assert metadata == {"name": "pytorch-mnist", "namespace": "kubeflow"}

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
        assert (spec["cleanPodPolicy"], spec["shm"]) == ("None", {"sizeLimit": "64Gi"})
        assert [volume["name"] for volume in spec["template"]["spec"]["volumes"]] == ["data"]
        (sidecar,) = spec["template"]["spec"]["initContainers"]
        assert (sidecar["name"], sidecar["restartPolicy"]) == ("tensorboard", "Always")
        assert spec["template"]["spec"]["priorityClassName"] == "high"
        for words in ("minAvailable", "spec.checkpoint", "WORLD_SIZE", "--nnodes, --nproc-per-node", "native sidecar"):
            assert words in notes

    def test_queue_becomes_kueue_label(self) -> None:
        labels = convert(yaml.safe_load(LLM)).resource["metadata"]["labels"]
        assert labels == {"team": "nlp", "kueue.x-k8s.io/queue-name": "research"}


class TestDetails:
    def test_restart_policy_never_sets_max_restarts_0(self) -> None:
        spec, _ = converted(MNIST.replace("OnFailure", "Never"))
        assert spec["recovery"] == {"maxRestarts": 0}

    def test_differing_master_template_is_noted_with_its_path(self) -> None:
        def edit(document: Object) -> None:
            pod = document["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
            pod["containers"][0]["resources"] = {"limits": {"memory": "1Gi"}}

        spec, notes = converted(change(MNIST, edit))
        assert "Master.template.spec.containers[0].resources: differs" in notes
        assert "resources" not in trainer(spec)

    @pytest.mark.parametrize(
        "script", ["cd /work && python t.py", "for i in 1; do python t.py; done", "python t.py $ARGS"]
    )
    def test_shell_script_is_kept_with_note(self, script: str) -> None:
        def edit(document: Object) -> None:
            for replica in document["spec"]["pytorchReplicaSpecs"].values():
                replica["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", script]

        spec, notes = converted(change(MNIST, edit))
        assert trainer(spec)["command"] == ["sh", "-c", script]
        assert "a shell starts the training" in notes

    @pytest.mark.parametrize(
        ("line", "command"),
        [
            ("torchrun --no-python --nnodes=2 ./train --x", ["./train", "--x"]),
            ("torchrun --run-path --shutdown-timeout 9 train.py", ["torchrun", "train.py"]),
            (
                "torchrun --tee 3 --nnodes 2 train.py --nnodes 2",
                ["torchrun", "--tee", "3", *["train.py", "--nnodes", "2"]],
            ),
            (
                "python -m torch.distributed.launch --use_env --nproc_per_node=8 -m pkg.train",
                [*["python", "-m", "torch.distributed.launch", "--use_env", "-m", "pkg.train"]],
            ),
        ],
    )
    def test_flags_owned_by_operator_are_removed(self, line: str, command: list[str]) -> None:
        def edit(document: Object) -> None:
            for replica in document["spec"]["pytorchReplicaSpecs"].values():
                replica["template"]["spec"]["containers"][0]["command"] = line.split()

        assert trainer(converted(change(MNIST, edit))[0])["command"] == command

    def test_unknown_field_is_noted(self) -> None:
        def edit(document: Object) -> None:
            document["spec"]["futureThing"] = 1

        assert "spec.futureThing: has no equivalent" in converted(change(MNIST, edit))[1]

    def test_notes_are_comments_and_input_is_unchanged(self) -> None:
        document = yaml.safe_load(LLM)
        before = yaml.safe_dump(document)
        text = convert(document).write()
        assert yaml.safe_dump(document) == before
        head = text.partition("apiVersion")[0].splitlines()
        assert len(head) > 8
        assert all(line.startswith("#") for line in head)

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


class TestConvertedCommand:
    def test_other_objects_of_file_are_printed_unchanged(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(f"{MNIST}\n---\nkind: ConfigMap\napiVersion: v1\nmetadata: {{name: c}}\n")
        assert main(["convert", str(path)]) == 0
        kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
        assert kinds == ["DDPTrainingJob", "ConfigMap"]

    def test_invalid_date_is_kept_as_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(f"{MNIST}\n---\nkind: ConfigMap\ndata: {{day: 2024-13-45}}\n")
        assert main(["convert", str(path)]) == 0
        *_, config = yaml.safe_load_all(capsys.readouterr().out)
        assert config["data"] == {"day": "2024-13-45"}

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

    def test_args_without_command_are_noted(self) -> None:
        def edit(document: Object) -> None:
            for replica in document["spec"]["pytorchReplicaSpecs"].values():
                container = replica["template"]["spec"]["containers"][0]
                del container["command"]
                container["args"] = ["--backend", "gloo"]

        notes = convert(yaml.safe_load(change(MNIST, edit))).notes
        assert any("image's entrypoint" in note and "only its arguments" in note for note in notes)

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
