"""The pod that fetches is like a training pod without GPUs, peers and placement; training pods mount its result."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest

from ddp_cli.local.container import build_environment
from ddp_operator.api import constants
from ddp_operator.features.inputs import read_inputs
from ddp_operator.manifests.children import build_children
from tests.support.builders import Json, job, template, trainer

CLAIM = {"url": "s3://bucket/set", "mountPath": "/data", "claimName": "data"}
CACHED = {"url": "hf://team/model", "mountPath": "/model", "nodePath": "/var/cache/ddp"}
GPU_POD = template(
    trainer(
        resources={"limits": {"nvidia.com/gpu": "8"}},
        args=["--lr", "1"],
        env=[{"name": "HTTPS_PROXY", "value": "http://proxy"}],
        volumeMounts=[{"name": "certificates", "mountPath": "/etc/ssl"}],
        securityContext={"runAsUser": 7},
        ports=[{"containerPort": 80}],
    ),
    metadata={"labels": {"team": "a"}},
    volumes=[{"name": "certificates", "configMap": {"name": "ca"}}],
    initContainers=[{"name": "first", "image": "x"}],
    imagePullSecrets=[{"name": "registry"}],
    serviceAccountName="reader",
    tolerations=[{"key": "gpu", "operator": "Exists"}],
    nodeSelector={"gpu": "h100", "kubernetes.io/arch": "amd64", "topology.kubernetes.io/zone": "b"},
    affinity={"nodeAffinity": {}},
    runtimeClassName="nvidia",
    securityContext={"fsGroup": 7},
)


def fetch_job(*inputs: Json, **spec: Any) -> Json:
    [*_, made] = build_children(job(**({"template": GPU_POD} | spec), inputs=list(inputs)), attempt=0, nodes=0)
    kubernetes_validate.validate(made, "1.31", strict=True)
    return made


def training_pod(*inputs: Json, **spec: Any) -> Json:
    [*_, made] = build_children(job(**spec, inputs=list(inputs)), attempt=1, nodes=1)
    kubernetes_validate.validate(made, "1.31", strict=True)
    result: Json = made["spec"]["template"]["spec"]
    return result


class TestFetchPod:
    def test_fetch_pod_has_no_gpus_peers_or_placement(self) -> None:
        template = fetch_job(CLAIM)["spec"]["template"]
        pod = template["spec"]
        [container] = pod["containers"]
        assert template["metadata"]["labels"]["team"] == "a"
        assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("reader", [{"name": "registry"}])
        assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
        assert pod["securityContext"]["fsGroup"] == 7
        assert container["securityContext"]["runAsUser"] == 7
        assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64", "topology.kubernetes.io/zone": "b"}
        assert {"affinity", "runtimeClassName", "initContainers", "subdomain"}.isdisjoint(pod)
        assert {"args", "ports"}.isdisjoint(container)
        assert "limits" not in container["resources"]
        assert container["command"] == ["python", "/opt/ddp-operator/launcher.py", "fetch"]
        assert {"name": "HTTPS_PROXY", "value": "http://proxy"} in container["env"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/etc/ssl", constants.LAUNCHER_MOUNT_PATH} < mounts

    @pytest.mark.parametrize(
        ("limits", "expected"),
        [
            ({}, {"requests": {"cpu": "250m", "memory": "256Mi"}}),
            (
                {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": 8},
                {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
            ),
            (
                {"cpu": 0.1, "memory": "128Mi", "ephemeral-storage": "1Gi"},
                {
                    "requests": {"cpu": 0.1, "memory": "128Mi"},
                    "limits": {"cpu": 0.1, "memory": "128Mi", "ephemeral-storage": "1Gi"},
                },
            ),
        ],
    )
    @pytest.mark.parametrize("has_node_cache", [False, True])
    @pytest.mark.parametrize("of_pod", [False, True])
    def test_fetching_containers_have_limits_of_trainer(
        self, limits: Json, expected: Json, of_pod: bool, has_node_cache: bool
    ) -> None:
        """A ResourceQuota on limits refuses pods with a container that has none."""
        store = {"nodePath": "/cache"} if has_node_cache else {"claimName": "c"}
        made = template(resources={"limits": limits}) if of_pod else template(trainer(resources={"limits": limits}))
        typed = job(template=made, inputs=[{"url": "https://h/f", "mountPath": "/in", **store}])
        built = [build_children(typed, attempt=0, nodes=2)[-1]["spec"]["template"]["spec"]["containers"][0]]
        if has_node_cache:
            pod = build_children(typed, attempt=1, nodes=2)[-1]["spec"]["template"]["spec"]
            built += [container for container in pod["initContainers"] if container["name"] == "ddp-inputs"]
        assert built[0]["resources"] == expected
        # A LimitRange that allows the template allows this container too, and the pod requests no more for it.
        assert [item["resources"] for item in built[1:]] == [
            expected | {"requests": expected["requests"] | expected.get("limits", {})}
        ] * has_node_cache

    def test_fetch_job_fails_on_final_errors_and_replaces_stopped_pods(self) -> None:
        spec = fetch_job(CLAIM)["spec"]
        assert (spec["completions"], spec["backoffLimit"]) == (1, 3)
        rules = spec["podFailurePolicy"]["rules"]
        codes = {code: rule["action"] for rule in rules[1:] for code in rule["onExitCodes"]["values"]}
        assert codes == {85: "Ignore", 81: "FailJob"}

    def test_knows_each_secret_by_variables_of_its_own(self) -> None:
        with_secret = CLAIM | {"secretRef": {"name": "keys"}}
        spec = fetch_job(CACHED, with_secret)["spec"]["template"]["spec"]
        [container] = spec["containers"]
        secret = {"kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"TOKEN": "t"}}
        pod = {"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}
        env = build_environment(pod, container, lambda kind, name: secret if kind == "Secret" else None)
        report = json.loads(env[constants.ENV_INPUTS])
        assert [item["secret"] for item in report] == ["", "DDP_INPUTS_1_"]
        assert env["DDP_INPUTS_1_TOKEN"] == "t"

    def test_node_cache_has_one_fetch_pod_per_eligible_node(self) -> None:
        made = fetch_job(CACHED, nodes=3, spares=1)["spec"]
        pod = made["template"]["spec"]
        assert made["completions"] == made["parallelism"] == 4
        assert pod["nodeSelector"]["gpu"] == "h100"
        [apart] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart["labelSelector"]["matchLabels"].items() <= made["template"]["metadata"]["labels"].items()
        assert apart["topologyKey"] == "kubernetes.io/hostname"

    def test_dollar_in_url_is_escaped(self) -> None:
        [container] = fetch_job(CLAIM | {"url": "https://host/$(HOME)/$$x"})["spec"]["template"]["spec"]["containers"]
        env = build_environment({"metadata": {}}, container, lambda kind, name: None)
        assert json.loads(env[constants.ENV_INPUTS])[0]["url"] == "https://host/$(HOME)/$$x"


class TestTrainingPod:
    def test_folders_are_mounted_read_only_from_one_claim_volume(self) -> None:
        pod = training_pod(CLAIM, CLAIM | {"url": "s3://bucket/other", "mountPath": "/other"})
        volumes = [v for v in pod["volumes"] if v["name"].startswith("ddp-inputs")]
        assert [v["persistentVolumeClaim"] for v in volumes] == [{"claimName": "data"}]
        mounts = {m["mountPath"]: m for m in pod["containers"][0]["volumeMounts"]}
        assert (mounts["/data"]["readOnly"], mounts["/other"]["readOnly"]) == (True, True)
        assert mounts["/data"]["subPath"].startswith("ddp-inputs/set-")
        assert mounts["/data"]["subPath"] != mounts["/other"]["subPath"]
        assert "initContainers" not in pod

    def test_has_folder_to_which_other_pod_has_fetched(self) -> None:
        for item in (CLAIM, CACHED):
            [container] = fetch_job(item)["spec"]["template"]["spec"]["containers"]
            report = json.loads(next(v["value"] for v in container["env"] if v["name"] == constants.ENV_INPUTS))[0]
            mounts = training_pod(item)["containers"][0]["volumeMounts"]
            [mount] = [m for m in mounts if m["mountPath"] == item["mountPath"]]
            assert mount["subPath"] == f"{constants.INPUTS_FOLDER}/{report['key']}/data"
            [whole] = [m for m in container["volumeMounts"] if m["mountPath"] == report["root"]]
            assert whole["name"] == mount["name"]

    def test_fetch_checks_node_cache_first(self) -> None:
        pod = training_pod(CLAIM, CACHED, template=GPU_POD)
        check, first = pod["initContainers"]
        assert first["name"] == "first"
        [report] = json.loads(next(v["value"] for v in check["env"] if v["name"] == constants.ENV_INPUTS))
        assert report["url"] == CACHED["url"]
        assert "limits" not in check["resources"]
        assert check["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(("changes", "same"), [({"name": "set"}, True), ({"checksum": "sha256:" + "0" * 64}, False)])
def test_identical_inputs_are_stored_once(changes: Json, same: bool) -> None:
    first, second = (read_inputs(job(inputs=[CLAIM | more]).spec) for more in ({}, changes))
    assert (first[0].place == second[0].place) == same
