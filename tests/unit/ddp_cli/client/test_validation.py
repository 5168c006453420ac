"""Broken manifests: each is refused in one sentence with field and remedy, at the earliest possible place.

``crd``: by schema and CEL rules at ``kubectl apply``, which ``parse_manifest`` does offline. ``operator``: stored, then
Accepted=False with no child; ``ddp render`` and ``ddp run`` refuse it before. ``api server``: as ``operator``, by the
dry-run of the Job. The sentence is the same in all of them.
"""
# ruff: noqa: E501 (a row of the table is a line)

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import yaml

from ddp_cli.client.validation import check_manifest
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.api.structural import document_of
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import FEATURES, SCHEMA
from ddp_operator.kube.postings import Postings
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import resource, template, trainer
from tests.support.fake_cluster import ReconcilerHarness

CONTAINER = "spec.template.spec.containers[0]"
GPUS = {"limits": {"nvidia.com/gpu": "4"}}
INPUT = {"url": "https://host/file", "mountPath": "/data", "claimName": "data"}
SIDECAR = {"name": "logs", "image": "x"}


@dataclass(frozen=True)
class BrokenManifest:
    """One broken manifest, where it is refused, and the sentence."""

    name: str
    place: Literal["crd", "operator", "api server"]
    given: Any
    sentence: str

    @property
    def text(self) -> str:
        return self.given if isinstance(self.given, str) else yaml.safe_dump(self.given)


def job(**spec: Any) -> Any:
    return resource(**spec)


def pod(*containers: Any, **members: Any) -> Any:
    return resource(template=template(*containers, **members))


def inputs(**changes: Any) -> Any:
    return job(inputs=[{name: value for name, value in (INPUT | changes).items() if value is not None}])


def named(name: Any) -> Any:
    return resource() | {"metadata": {"name": name}}


FIELDS = ", ".join(document_of(SCHEMA.spec)["properties"])
ROWS = [
    BrokenManifest("misspelt field", "crd", job(verbose=3), f'unknown field "spec.verbose"; known fields: {FIELDS}'),
    BrokenManifest("field of another operator", "crd", job(replicas=3), 'unknown field "spec.replicas"; write nodes: the number of pods'),
    BrokenManifest("field of the recovery", "crd", job(maxRestarts=3), 'unknown field "spec.maxRestarts"; write recovery.maxRestarts'),
    BrokenManifest("GPUs as a field", "crd", job(gpus=3), 'unknown field "spec.gpus"; request GPUs as nvidia.com/gpu in resources.limits of the container, in spec.template.spec.containers'),
    BrokenManifest("container's field in the spec", "crd", job(image="x"), 'unknown field "spec.image"; it belongs to the container, in spec.template.spec.containers'),
    BrokenManifest("spec's field beside it", "crd", job() | {"nodes": 2}, 'unknown field "nodes"; it belongs below spec: spec.nodes'),
    BrokenManifest("suspend as text", "crd", job(suspend="yes"), 'spec.suspend: Invalid value: "string": spec.suspend in body must be of type boolean: "string"; write true or false, without quotes'),
    BrokenManifest("one pattern without a list", "crd", job(metrics={"logPatterns": "(?P<step>.)"}), "spec.metrics.logPatterns: Invalid value: \"string\": spec.metrics.logPatterns in body must be of type array: \"string\"; write a list: [a, b], or one line with '- ' for each item"),
    BrokenManifest("end without its field", "crd", job(idle=8), 'spec.idle: Invalid value: "integer": spec.idle in body must be of type object: "integer"; write its fields below it: minutes, action'),
    BrokenManifest("job of another operator", "crd", "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n", "kind: the file has no kind DDPTrainingJob (found: PyTorchJob); convert the PyTorchJob with `ddp convert`"),
    BrokenManifest("script instead of a job", "crd", "import torch\n", "the file: contains a document that is not a Kubernetes object; remove it, or pass the path of a job's YAML"),
    BrokenManifest("containers without a list", "operator", job(template={"spec": {"containers": trainer()}}), "spec.template.spec.containers: must be a list; write '- ' before the first member of each container"),
    BrokenManifest("variables without a list", "operator", pod(trainer(env={"A": "1"})), f"{CONTAINER}.env: must be a list of objects; write {{name: NAME, value: TEXT}} for each variable"),
    BrokenManifest("variable that is a number", "operator", pod(trainer(env=[{"name": "A", "value": 1}])), f"{CONTAINER}.env[0].value: Invalid value: 1: must be a string; quote it"),
    BrokenManifest("resource by half its name", "operator", pod(trainer(resources={"limits": {"gpu": 1}})), f"{CONTAINER}.resources.limits[gpu]: is not a resource; use cpu, memory, ephemeral-storage or the full name of a device, such as nvidia.com/gpu"),
    BrokenManifest("GPUs only requested", "operator", pod(trainer(resources={"requests": {"nvidia.com/gpu": 1}})), f"{CONTAINER}.resources.requests[nvidia.com/gpu]: devices must be requested as a limit; set it in {CONTAINER}.resources.limits"),
    BrokenManifest("memory in another unit", "operator", pod(trainer(resources={"limits": {"memory": "8GB"}})), f'{CONTAINER}.resources.limits[memory]: Invalid value: "8GB": must be a quantity: a number, with or without a suffix, such as 8Gi'),
    BrokenManifest("pod's memory in another unit", "operator", pod(resources={"limits": {"memory": "8GB"}}), 'spec.template.spec.resources.limits[memory]: Invalid value: "8GB": must be a quantity: a number, with or without a suffix, such as 8Gi'),
    BrokenManifest("pod's limits as a list", "operator", pod(resources={"limits": ["8Gi"]}), "spec.template.spec.resources.limits: must be an object"),
    BrokenManifest("mount of no volume", "operator", pod(trainer(volumeMounts=[{"name": "data", "mountPath": "/data"}])), f'{CONTAINER}.volumeMounts[0].name: Invalid value: "data": the volume does not exist; add it to spec.template.spec.volumes'),
    BrokenManifest("nearly right field", "crd", job(recovery={"maxRestart": 3}), 'unknown field "spec.recovery.maxRestart"; did you mean maxRestarts?'),
    BrokenManifest("unknown top-level field", "crd", job() | {"specs": {}}, 'unknown field "specs"; did you mean spec?'),
    BrokenManifest("no nodes", "crd", job(nodes=0), "spec.nodes: Invalid value: 0: must be between 1 and 5000; to stop all pods, set suspend: true"),
    BrokenManifest("nodes as text", "crd", job(nodes="2"), 'spec.nodes: Invalid value: "string": spec.nodes in body must be of type integer: "string"; write a whole number, without quotes'),
    BrokenManifest("half a node", "crd", job(nodes=1.5), 'spec.nodes: Invalid value: "number": spec.nodes in body must be of type integer: "number"; write a whole number, without quotes'),
    BrokenManifest("name too long", "crd", named("a" * 51), "metadata.name: Invalid value: metadata.name must have at most 50 characters, because pod host names are <name>-<attempt>-<index>; choose a shorter name"),
    BrokenManifest("name with dots", "crd", named("a.b"), "metadata.name: Invalid value: metadata.name must consist of lower-case letters, digits and '-', start with a letter and end with a letter or digit, because the job's Service has the same name; change it"),
    BrokenManifest("name as a number", "crd", named(2026), "metadata.name: Invalid value: 2026: must be a string; quote it"),
    BrokenManifest("no name", "crd", resource() | {"metadata": {}}, "metadata.name: Required value: add a name"),
    BrokenManifest("no spec", "crd", {k: v for k, v in resource().items() if k != "spec"}, "spec: Required value: add spec with at least spec.template"),
    BrokenManifest("no template", "crd", resource() | {"spec": {"nodes": 1}}, "spec.template: Required value: it has no default; add it"),
    BrokenManifest("unknown backend", "crd", job(rendezvous={"backend": "etcd"}), 'spec.rendezvous.backend: Unsupported value: "etcd": supported values: "c10d", "static"'),
    BrokenManifest("processes as a word", "crd", job(procPerNode="all"), 'spec.procPerNode: Invalid value: "all": must be auto, gpu, cpu or a number between 1 and 1024; leave it out to use auto'),
    BrokenManifest("privileged port", "crd", job(metrics={"port": 80}), "spec.metrics.port: Invalid value: 80: must be between 1024 and 65535; leave it out to use the default"),
    BrokenManifest("metrics on the rendezvous port", "crd", job(metrics={"port": 29400}), "spec.metrics.port: Invalid value: must differ from rendezvous.port, because pod 0 listens on both; change one of them"),
    BrokenManifest("static with restarts", "crd", job(rendezvous={"backend": "static"}, recovery={"inPlaceRestarts": 2}), "spec.recovery.inPlaceRestarts: Invalid value: must be 0 with the static rendezvous, which can't restart workers; set it to 0 or set rendezvous.backend: c10d"),
    BrokenManifest("relative checkpoint path", "crd", job(checkpoint={"path": "ckpt"}), 'spec.checkpoint.path: Invalid value: "ckpt": must be an absolute path, such as /ckpt; add the leading slash'),
    BrokenManifest("no checkpoint path", "crd", job(checkpoint={"claimName": "c"}), "spec.checkpoint.path: Required value: it has no default; add it"),
    BrokenManifest("shared memory in words", "crd", job(sharedMemory="8 GB"), 'spec.sharedMemory: Invalid value: "8 GB": must be a quantity such as 8Gi, or a share such as 50%; leave it out to use half of the node\'s memory'),
    BrokenManifest("exit code beyond a byte", "crd", job(recovery={"nonRetryableExitCodes": [300]}), "spec.recovery.nonRetryableExitCodes: Invalid value: must contain only exit codes between 1 and 255; remove all other values"),
    BrokenManifest("queue of another scheduler", "crd", job(scheduling={"queue": "q"}), "spec.scheduling.queue: Invalid value: needs scheduling.gang: Volcano; set that, or remove this field and set the label kueue.x-k8s.io/queue-name for Kueue"),
    BrokenManifest("networks without a policy", "crd", job(networkPolicy={"egressCidrs": ["10.0.0.0/8"]}), "spec.networkPolicy.egressCidrs: Invalid value: has no effect without networkPolicy.enabled: true; set that or remove this field"),
    BrokenManifest("network that is none", "operator", job(networkPolicy={"enabled": True, "egressCidrs": ["ten/8"]}), "spec.networkPolicy.egressCidrs[0]: Invalid value: \"ten/8\": is not a network ('ten/8' does not appear to be an IPv4 or IPv6 network); write it such as 10.0.0.0/8, or one host as 10.1.2.3/32"),
    BrokenManifest("a reader without a policy", "operator", job(networkPolicy={"metricsFrom": []}), "spec.networkPolicy.metricsFrom: Invalid value: has no effect without networkPolicy.enabled: true; set that or remove this field"),
    BrokenManifest("reader that is nobody", "operator", job(networkPolicy={"enabled": True, "metricsFrom": [{}]}), "spec.networkPolicy.metricsFrom[0]: Invalid value: must have namespaceSelector, podSelector or ipBlock; write it as in a NetworkPolicy's `from`"),
    BrokenManifest("reader that is none", "operator", job(networkPolicy={"enabled": True, "metricsFrom": [{"namespace": "monitoring"}]}), "spec.networkPolicy.metricsFrom[0]: Invalid value: must have namespaceSelector, podSelector or ipBlock; write it as in a NetworkPolicy's `from`"),
    BrokenManifest("duplicate key", "crd", yaml.safe_dump(resource()) + "kind: Job\n", 'line 15: key "kind" is duplicated; remove one'),
    BrokenManifest("not YAML", "crd", "kind: [DDPTrainingJob\n", "line 2, column 1: not valid YAML: did not find expected ',' or ']'; fix the file there"),
    BrokenManifest("two jobs in one file", "crd", yaml.safe_dump_all([resource("a"), resource("b")]), "kind: the file has 2 objects of kind DDPTrainingJob (found: DDPTrainingJob); it must have exactly one"),
    BrokenManifest("no job in the file", "crd", "kind: Job\n", "kind: the file has no kind DDPTrainingJob (found: Job); `ddp init SCRIPT` writes one"),
    BrokenManifest("wrong apiVersion", "crd", resource() | {"apiVersion": "ddp-operator.dev/v1"}, 'apiVersion: Invalid value: "ddp-operator.dev/v1": must be ddp-operator.dev/v1alpha1; change it'),
    BrokenManifest("reserved variable", "operator", pod(trainer(env=[{"name": "RANK", "value": "0"}])), f'{CONTAINER}.env[0].name: Invalid value: "RANK": is reserved: torchrun and the operator set it; remove it'),
    BrokenManifest("torchrun's own variable", "operator", pod(trainer(env=[{"name": "PET_NNODES", "value": "2"}])), f'{CONTAINER}.env[0].name: Invalid value: "PET_NNODES": is reserved: torchrun and the operator set it; remove it'),
    BrokenManifest("no container", "operator", job(template={"spec": {"containers": []}}), "spec.template.spec.containers: Required value: needs a container named trainer with the training command; add it"),
    BrokenManifest("template without spec", "crd", job(template={}), "spec.template.spec: Required value: it has no default; add it"),
    BrokenManifest("two containers without a trainer", "operator", pod(SIDECAR, {"name": "b", "image": "x"}), "spec.template.spec.containers: has 2 containers, but none is named trainer; rename the training container"),
    BrokenManifest("sidecar that is not native", "operator", pod(trainer(), SIDECAR), 'spec.template.spec.containers[1]: container "logs" would keep the job running after the trainer has ended; move it to initContainers with restartPolicy: Always (a native sidecar)'),
    BrokenManifest("no image", "operator", pod(trainer(image=None)), f"{CONTAINER}.image: Required value: needs an image with Python and torch; add it"),
    BrokenManifest("neither command nor args", "operator", pod(trainer(command=None)), f"{CONTAINER}.command: has neither command nor args, and the operator does not read the image's entrypoint; write the training command, for example [python, train.py]"),
    BrokenManifest("command as one text", "operator", pod(trainer(command="python train.py")), f"{CONTAINER}.command: must be a list of strings; split it and quote numbers and booleans, for example [python, train.py, --lr, \"0.1\"]"),
    BrokenManifest("torchrun with a flag of the operator's", "operator", pod(trainer(command=["torchrun", "--nnodes=2", "x.py"])), f"{CONTAINER}.command: --nnodes: set spec.nodes instead"),
    BrokenManifest("torchrun has no script", "operator", pod(trainer(command=["torchrun"])), f"{CONTAINER}.command: torchrun has no script; write for example [torchrun, train.py]"),
    BrokenManifest("GPUs with procPerNode cpu", "operator", job(procPerNode="cpu", template=template(trainer(resources=GPUS))), f'spec.procPerNode: Invalid value: "cpu": would leave the 4 GPUs in {CONTAINER}.resources idle; use gpu or remove them'),
    BrokenManifest("procPerNode gpu without GPU", "operator", job(procPerNode="gpu"), f'spec.procPerNode: Invalid value: "gpu": needs a GPU in {CONTAINER}.resources.limits; add nvidia.com/gpu or use auto'),
    BrokenManifest("more processes than GPUs", "operator", job(procPerNode=8, template=template(trainer(resources=GPUS))), f"spec.procPerNode: Invalid value: 8: is more than the 4 GPUs in {CONTAINER}.resources; request 8 GPUs there or use gpu"),
    BrokenManifest("container on the rendezvous port", "operator", pod(trainer(ports=[{"containerPort": 29400}])), f"{CONTAINER}.ports[0].containerPort: Invalid value: 29400: is the port of spec.rendezvous.port, which the operator declares; remove it, or change one of the two"),
    BrokenManifest("restartPolicy of another kind", "operator", pod(restartPolicy="OnFailure"), 'spec.template.spec.restartPolicy: Invalid value: "OnFailure": must be Never, because spec.recovery configures restarts; remove it'),
    BrokenManifest("unknown field beside the pod's spec", "crd", job(template=template() | {"specc": {}}), 'unknown field "spec.template.specc"; did you mean spec?'),
    BrokenManifest("input without a place", "operator", inputs(claimName=None), "spec.inputs[0]: needs either claimName or nodePath to store it; set one of the two"),
    BrokenManifest("input with two places", "operator", inputs(nodePath="/cache"), "spec.inputs[0]: needs either claimName or nodePath to store it; set one of the two"),
    BrokenManifest("input that is no URL", "operator", inputs(url="/data/file"), 'spec.inputs[0].url: Invalid value: "/data/file": must be a URL, such as https://host/file or s3://bucket/prefix'),
    BrokenManifest("input with a password", "operator", inputs(url="https://me:secret@host/file"), "spec.inputs[0].url: must not contain a password; put HTTP_AUTHORIZATION into a Secret and set secretRef"),
    BrokenManifest("input with a key", "operator", inputs(url="s3://KEY:sec/ret@bucket/x"), "spec.inputs[0].url: must not contain a password; put the plug-in's variables into a Secret and set secretRef"),
    BrokenManifest("checkpoint with a key", "operator", job(checkpoint={"path": "/c", "url": "s3://KEY:sec/ret@bucket/x"}), "spec.checkpoint.url: must not contain a password; put it into a Secret, and name that in spec.checkpoint.secretRef"),
    BrokenManifest("tracker with a password", "operator", job(tracking={"mlflow": {"trackingUri": "https://me:secret@host"}}), "spec.tracking.mlflow.trackingUri: must not contain a password; put it into a Secret, and name that in spec.tracking.mlflow.secretRef"),
    BrokenManifest("input at a relative path", "operator", inputs(mountPath="data"), 'spec.inputs[0].mountPath: Invalid value: "data": must be an absolute path other than /, such as /data'),
    BrokenManifest("input at a path that is taken", "operator", inputs(mountPath="/opt/ddp-operator/"), 'spec.inputs[0].mountPath: Invalid value: "/opt/ddp-operator/": is already used by the operator; choose another path'),
    BrokenManifest("input with a wrong checksum", "operator", inputs(checksum="md5:1"), 'spec.inputs[0].checksum: Invalid value: "md5:1": must be sha256: and 64 hexadecimal digits in lower case, as sha256sum prints them'),
    BrokenManifest("two inputs of a name", "operator", job(inputs=[INPUT, INPUT | {"mountPath": "/more"}]), 'spec.inputs[1].name: Invalid value: "file": is the name of another input; set a unique name'),
    BrokenManifest("two inputs at a path", "operator", job(inputs=[INPUT, INPUT | {"name": "more"}]), 'spec.inputs[1].mountPath: Invalid value: "/data": is already used by spec.inputs[0].mountPath; choose another path'),
    BrokenManifest("cache at a relative path", "operator", inputs(claimName=None, nodePath="cache"), 'spec.inputs[0].nodePath: Invalid value: "cache": must be an absolute path on the nodes, such as /var/cache/ddp'),
    BrokenManifest("label that is a number", "operator", job(template=template(metadata={"labels": {"v": 1}})), "spec.template.metadata.labels: must map strings to strings; quote numbers and booleans"),
    BrokenManifest("unknown field of the container", "api server", pod(trainer(imagePullPolcy="Always")), f'unknown field "{CONTAINER}.imagePullPolcy"; did you mean imagePullPolicy?'),
    BrokenManifest("unknown field of the pod", "api server", pod(nodeSelektor={}), 'unknown field "spec.template.spec.nodeSelektor"; did you mean nodeSelector?'),
    BrokenManifest("unknown field deep in the pod", "api server", pod(volumes=[{"name": "v", "emptyDir": {"sizeLimt": "1Gi"}}]), 'unknown field "spec.template.spec.volumes[0].emptyDir.sizeLimt"; did you mean sizeLimit?'),
    BrokenManifest("unknown field deeper than the table", "api server", pod(volumes=[{"name": "v", "hostPath": {"path": "/x", "tpe": "File"}}]), 'unknown field "spec.template.spec.volumes[0].hostPath.tpe"; remove it or correct its name'),
    BrokenManifest("container's field in the pod", "api server", pod(command=["a"]), 'unknown field "spec.template.spec.command"; it belongs to the container, in spec.template.spec.containers'),
    BrokenManifest("pod's field in the container", "api server", pod(trainer(nodeSelector={"a": "b"})), f'unknown field "{CONTAINER}.nodeSelector"; it belongs below spec.template.spec'),
    BrokenManifest("misspelt command", "operator", pod({"name": "trainer", "image": "x", "comand": ["python", "train.py"]}), f'unknown field "{CONTAINER}.comand"; did you mean command?'),
]  # fmt: skip
by_name = {"ids": lambda row: row.name.replace(" ", "_")}


def refusal(check: Any, text: str) -> str:
    with pytest.raises(InvalidManifest) as refused:
        check(text)
    return str(refused.value)


@pytest.mark.parametrize("row", ROWS, **by_name)
def test_offline_check_refuses_manifest_in_one_sentence(row: BrokenManifest) -> None:
    assert refusal(check_manifest, row.text) == row.sentence


@pytest.mark.parametrize("row", [row for row in ROWS if row.place == "crd"], **by_name)
def test_is_refused_at_first_place(row: BrokenManifest) -> None:
    assert refusal(lambda text: parse_manifest(text, SCHEMA), row.text) == row.sentence


@pytest.mark.parametrize("row", [row for row in ROWS if row.place == "operator"], **by_name)
async def test_is_stored_and_not_accepted_and_has_no_child(row: BrokenManifest) -> None:
    harness = await ReconcilerHarness(dict(parse_manifest(row.text, SCHEMA).resource), Hooks(FEATURES)).settle()
    assert harness.state("Accepted") == ("False", "InvalidSpec")
    assert harness.condition("Accepted").message == row.sentence
    assert harness.children() == {"Service": [], "ConfigMap": [], "Job": []}
    assert (harness.status.phase, harness.events) == ("Rejected", ["InvalidSpec"])


@pytest.mark.parametrize("row", [row for row in ROWS if row.place == "api server"], **by_name)
async def test_dry_run_refuses_manifest_with_same_message(row: BrokenManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = parse_manifest(row.text, SCHEMA)
    resolve_template(manifest.job)  # the operator itself accepts it
    harness = ReconcilerHarness(dict(manifest.resource), Hooks(FEATURES))
    path = row.sentence.split('"')[1]

    def admit(job: Any) -> None:
        words = f'Job in version "v1" cannot be handled as a Job: strict decoding error: unknown field "{path}"'
        raise Refused(Postings(FEATURES).explain_refusal(job, words), reason="Invalid")

    monkeypatch.setattr(harness.cluster, "_admit", admit)
    await harness.settle()
    assert harness.state("Accepted") == ("False", "InvalidSpec")
    assert harness.condition("Accepted").message == row.sentence
    assert harness.children()["Job"] == []


def test_field_of_newer_kubernetes_is_accepted() -> None:
    manifest = yaml.safe_dump(pod(resources={"limits": {"cpu": "8", "memory": "8Gi"}}, hostnameOverride="a"))
    assert check_manifest(manifest).children[-1]["spec"]["template"]["spec"]["resources"]["limits"]["cpu"] == "8"


def test_wrong_type_in_template_is_named_by_path() -> None:
    message = refusal(check_manifest, yaml.safe_dump(pod(trainer(livenessProbe={"periodSeconds": "often"}))))
    assert message.startswith(f"{CONTAINER}.livenessProbe.periodSeconds: 'often' is not of type 'integer'")
