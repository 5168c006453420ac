"""The objects of one attempt. tests/golden has their complete text; these tests have their invariants and reasons."""

import ast
import base64
import copy
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.api import child_names, constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.status import Status
from ddp_operator.kube.client import SEND_BUFFER
from ddp_operator.manifests.children import build_children, build_pod, load_launcher
from ddp_pod import bootstrap
from tests.support import ROOT
from tests.support.builders import UID, job, template, trainer


def children(attempt: int = 1, nodes: int = 2, **spec: Any) -> dict[str, Any]:
    made = build_children(job(**spec), attempt=attempt, nodes=nodes)
    return {child["kind"]: child for child in made}


def pod_of(**spec: Any) -> dict[str, Any]:
    pod: dict[str, Any] = children(**spec)["Job"]["spec"]["template"]["spec"]
    return pod


def env_of(**spec: Any) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod_of(**spec)["containers"][0]["env"]}


def dump_code(source: str) -> str:
    """Return a module's code with its lines, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
            node.end_lineno = node.end_col_offset = 0
    for node in ast.walk(tree):  # whose last statement is a docstring
        if hasattr(node, "end_lineno"):
            node.end_lineno = node.end_col_offset = 0
    return ast.dump(tree, include_attributes=True)


class TestFailedNodes:
    AWAY = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("bad-1", "bad-2")]
    STATUS = Status(failed_nodes=("bad-1", "bad-2"))

    def terms(self, **spec: Any) -> Any:
        pod = pod_of(status=self.STATUS, **spec)
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return required["nodeSelectorTerms"]

    def test_are_avoided_by_name(self) -> None:
        assert self.terms() == [{"matchFields": self.AWAY}]

    def test_avoided_nodes_are_added_to_every_alternative_of_user(self) -> None:
        zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
        expected = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}}
        affinity = {**expected, "podAffinity": {"x": 1}}
        before = copy.deepcopy(affinity)
        terms = self.terms(template=template(affinity=affinity))
        assert terms == [{**zone, "matchFields": self.AWAY} for zone in zones]
        assert affinity == before, "the user's own is not touched"

    def test_avoided_nodes_are_omitted_if_disabled(self) -> None:
        assert "affinity" not in pod_of(status=self.STATUS, recovery={"avoidFailedNodes": False})
        assert "affinity" not in pod_of()

    def replaced(self, returned: tuple[str, ...], avoided: tuple[str, ...] = (), **spec: Any) -> Any:
        made = children(status=self.STATUS, **spec)["Job"]
        made["metadata"]["uid"] = "u"
        pod = build_pod(made, 0, suffix="abcde", avoided=avoided, returned=returned)
        node = pod["spec"]["affinity"]["nodeAffinity"]
        return node.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")

    def test_replaced_pod_may_use_a_node_that_returned_after_its_job_was_created(self) -> None:
        [_, second] = self.AWAY
        other = {**second, "values": ["bad-3"]}
        assert self.replaced(("bad-1",), ("bad-2", "bad-3")) == [{"matchFields": [second, other]}]

    def test_replaced_pod_without_avoided_nodes_may_use_all_nodes(self) -> None:
        assert self.replaced(("bad-1", "bad-2")) is None, "a term without requirements matches no node"

    def test_requirements_of_user_remain_when_nodes_return(self) -> None:
        zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
        own = {**self.AWAY[0], "values": ["good-7"], "operator": "In"}
        terms = [zone, {"matchFields": [own]}]
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
        assert self.replaced(("bad-1", "bad-2"), template=template(affinity=affinity)) == terms


class TestAll:
    def test_children_have_owner_references(self) -> None:
        secret, service, launcher, made = build_children(job(), attempt=1, nodes=1)
        for child in (secret, service, made):
            [owner] = child["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"], owner["kind"]) == (UID, True, constants.KIND)
        assert "ownerReferences" not in launcher["metadata"], "of no single job"

    def test_children_have_job_label(self) -> None:
        made = children()
        assert made.pop("ConfigMap")["metadata"]["labels"] == child_names.child_labels(""), "of no single job"
        for child in made.values():
            assert child_names.child_labels("train").items() <= child["metadata"]["labels"].items()

    def test_invalid_template_builds_no_child(self) -> None:
        with pytest.raises(InvalidManifest):
            children(template={"spec": {}})

    def test_building_does_not_mutate_resource(self) -> None:
        made = template(trainer(env=[{"name": "A", "value": "1"}]), metadata={"labels": {"a": "b"}})
        typed = job(template=made)
        before = copy.deepcopy(typed.spec.template)
        first = build_children(typed, attempt=1, nodes=2)
        assert typed.spec.template == before
        assert build_children(typed, attempt=1, nodes=2) == first


class TestService:
    def test_selects_pods_of_every_attempt(self) -> None:
        selector = children()["Service"]["spec"]["selector"].items()
        for attempt in (1, 7):
            labels = children(attempt)["Job"]["spec"]["template"]["metadata"]["labels"]
            assert selector <= labels.items()


RECORDED = template(trainer(env=[{"name": constants.CHECK_VARIABLE, "value": "/records"}]))


class TestLauncherConfigMap:
    def test_is_in_immutable_config_map_named_by_its_hash(self) -> None:
        config_map = children()["ConfigMap"]
        assert config_map["immutable"] is True
        assert config_map["metadata"]["name"] == f"ddp-launcher-{load_launcher().digest[:12]}"
        assert config_map["data"] == {"launcher.py": load_launcher().bootstrap}
        assert base64.b64decode(config_map["binaryData"]["launcher.zip"]) == load_launcher().archive

    def test_its_sources_are_those_of_repository(self) -> None:
        root = Path(bootstrap.__file__).parent
        sources = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
        complete = load_launcher(frozenset(constants.OPTIONAL_FEATURES))
        assert complete.bootstrap == sources.pop("bootstrap.py")
        with zipfile.ZipFile(io.BytesIO(complete.archive)) as archive:
            archived = {name: archive.read(name).decode() for name in archive.namelist()}
        scripts = [path.relative_to(ROOT / "trainer").as_posix() for path in (ROOT / "trainer/ddp_sdk").rglob("*.py")]
        for name in (*scripts, "ddp_trainer/exporter.py", "ddp_trainer/memory.py"):
            assert archived.pop(name) == (ROOT / "trainer" / name).read_text(encoding="utf-8")
        assert archived.keys() == sources.keys()
        for name, source in sources.items():
            assert archived[name].count("\n") == source.count("\n")
            assert dump_code(archived[name]) == dump_code(source), name
        assert sum(map(len, archived.values())) < 0.9 * sum(map(len, sources.values()))

    @pytest.mark.parametrize(
        ("spec", "features"),
        [
            ({}, set()),
            ({"checkpoint": {"path": "/checkpoints", "url": "s3://bucket/job"}}, {"mirror"}),
            ({"checkpoint": {"path": "/checkpoints", "claimName": "checkpoints"}}, set()),
            ({"template": template(trainer(env=[{"name": constants.CHECK_VARIABLE, "value": "/records"}]))}, {"check"}),
            (
                {
                    "template": template(trainer(env=[{"name": constants.CHECK_VARIABLE, "value": "/r"}])),
                    "checkpoint": {"path": "/checkpoints", "url": "s3://bucket/job"},
                },
                {"check", "mirror"},
            ),
        ],
        ids=["plain", "url", "claim", "check", "both"],
    )
    def test_archive_has_only_the_optional_features_that_the_job_uses(
        self, spec: dict[str, Any], features: set[str]
    ) -> None:
        made = children(**spec)
        archive = base64.b64decode(made["ConfigMap"]["binaryData"]["launcher.zip"])
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            modules = {name for name in file.namelist() if not name.startswith(("ddp_sdk/", "ddp_trainer/"))}
        root = Path(bootstrap.__file__).parent
        expected = {path.relative_to(root).as_posix() for path in root.rglob("*.py")} - {"bootstrap.py"}
        for name in {"check", "dev", "mirror"} - features:
            absent = {module for module in expected if module.startswith(f"features/{name}/")}
            assert absent, name
            expected -= absent
        assert modules == expected
        volumes = made["Job"]["spec"]["template"]["spec"]["volumes"]
        [mounted] = [volume["configMap"]["name"] for volume in volumes if volume["name"] == constants.LAUNCHER_VOLUME]
        assert mounted == made["ConfigMap"]["metadata"]["name"]
        assert (mounted == f"ddp-launcher-{load_launcher().digest[:12]}") is (not features)

    def test_archive_is_same_in_each_build(self) -> None:
        first = load_launcher()
        load_launcher.cache_clear()
        assert load_launcher() == first

    def test_takes_at_most_half_of_what_a_config_map_may_have(self) -> None:
        limit = 2**20
        assert len(json.dumps(children()["ConfigMap"])) < 0.5 * limit

    def test_every_other_body_is_sent_in_one_piece(self) -> None:
        bodies = [len(json.dumps(child)) for kind, child in children().items() if kind != "ConfigMap"]
        assert max(bodies) < 0.5 * SEND_BUFFER

    def test_config_map_equals_what_pod_mounts_and_runs(self) -> None:
        made = children()
        pod = made["Job"]["spec"]["template"]["spec"]
        [volume] = [v for v in pod["volumes"] if v["name"] == constants.LAUNCHER_VOLUME]
        assert volume["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
        assert pod["containers"][0]["command"] == ["python", "/opt/ddp-operator/launcher.py", "run"]


class TestChildJob:
    @pytest.mark.parametrize("name", ["trainer", "main"])
    def test_job_fails_on_exit_codes_that_no_new_pod_can_fix(self, name: str) -> None:
        ignore, fail = children(template=template(trainer(name=name)))["Job"]["spec"]["podFailurePolicy"]["rules"]
        assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert fail["onExitCodes"] == {"containerName": name, "operator": "NotIn", "values": [85, 130, 137, 143, 255]}
        assert [ignore["action"], fail["action"]] == ["Ignore", "FailJob"]

    @pytest.mark.parametrize("suspend", [False, True])
    def test_annotation_has_suspend_that_operator_wrote(self, suspend: bool) -> None:
        """A suspended resource gets its Job when it is resumed, so that only another owner can suspend a Job."""
        made = children(suspend=suspend)["Job"]
        assert made["spec"]["suspend"] is False
        assert made["metadata"]["annotations"]["ddp-operator.dev/suspend"] == "false"

    def test_job_gets_only_queue_annotations(self) -> None:
        source = {
            "kueue.x-k8s.io/elastic-job": "true",
            "provreq.kueue.x-k8s.io/ValidUntilSeconds": "9",
            "notkueue.x-k8s.io/a": "b",
            "team": "a",
        }
        made = children(annotations=source)["Job"]["metadata"]["annotations"]
        assert set(made) - {"ddp-operator.dev/spec", "ddp-operator.dev/suspend"} == set(source) & {
            "kueue.x-k8s.io/elastic-job",
            "provreq.kueue.x-k8s.io/ValidUntilSeconds",
        }

    def test_partially_admitted_job_completes_with_its_pods(self) -> None:
        few = {"kueue.x-k8s.io/job-min-parallelism": "1"}
        made = children(annotations=few, elastic={"minNodes": 1, "maxNodes": 4})["Job"]["metadata"]["annotations"]
        assert made["kueue.x-k8s.io/job-completions-equal-parallelism"] == "true"

    def test_requested_topology_is_set_on_pods(self) -> None:
        source = {"kueue.x-k8s.io/podset-required-topology": "rack", "kueue.x-k8s.io/podset-slice-size": "2"}
        own = template(metadata={"annotations": {"kueue.x-k8s.io/podset-slice-size": "4"}})
        made = children(annotations=source, template=own)["Job"]["spec"]["template"]["metadata"]["annotations"]
        assert made["kueue.x-k8s.io/podset-required-topology"] == "rack"
        assert made["kueue.x-k8s.io/podset-slice-size"] == "4", "the template's own comes first"

    def test_children_inherit_labels_that_mean_nothing_to_other_tools(self) -> None:
        own = {"team": "vision", "corp.example/cost": "7", "app.kubernetes.io/part-of": "gpt"}
        private = {
            "kueue.x-k8s.io/queue-name": "q",
            "app.kubernetes.io/instance": "argo",
            "app.kubernetes.io/managed-by": "Helm",
            "argocd.argoproj.io/instance": "x",
            "helm.sh/chart": "x-1",
            "kustomize.toolkit.fluxcd.io/name": "x",
            "istio.io/rev": "canary",
            "ddp-operator.dev/job-name": "other",
        }
        made = children(labels=own | private)
        written = [child["metadata"]["labels"] for child in made.values()]
        written.append(made["Job"]["spec"]["template"]["metadata"]["labels"])
        for kind, labels in zip((*made, "Pod"), written, strict=True):
            # The launcher belongs to all jobs of the namespace: a deletion by the label of one would break the others.
            assert [key for key in own if labels.get(key) != own[key]] == ([*own] if kind == "ConfigMap" else [])
            assert not [key for key, value in private.items() if labels.get(key) == value and "queue" not in key]
        assert [labels.get("kueue.x-k8s.io/queue-name") for labels in written] == [
            "q" if child["kind"] == "Job" else None for child in made.values()
        ] + [None]

    def test_label_of_template_wins_over_inherited_one(self) -> None:
        labels = {"team": "pods", "app.kubernetes.io/managed-by": "Helm"}
        made = children(labels={"team": "job"}, template=template(metadata={"labels": labels}))
        pod = made["Job"]["spec"]["template"]["metadata"]["labels"]
        assert (pod["team"], pod["app.kubernetes.io/managed-by"]) == ("pods", "ddp-operator")

    def test_pod_zero_is_master_by_its_name(self) -> None:
        made = children(attempt=3)
        env = {e["name"]: e.get("value") for e in made["Job"]["spec"]["template"]["spec"]["containers"][0]["env"]}
        pod = build_pod(made["Job"] | {"metadata": made["Job"]["metadata"] | {"uid": "u"}}, 0, suffix="abcde")
        assert env["MASTER_ADDR"] == f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}" == "train-3-0.train"


class TestPodOfAttempt:
    def test_restricted_profile_adds_rest(self) -> None:
        pod = pod_of(securityProfile="Restricted")
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    @pytest.mark.parametrize(
        "own",
        [
            {"privileged": True},
            {"capabilities": {"add": ["SYS_ADMIN"]}},
            {"capabilities": {"add": ["IPC_LOCK", "CAP_SYS_ADMIN"]}},
            {"allowPrivilegeEscalation": True},
        ],
    )
    def test_security_settings_of_user_are_kept(self, own: dict[str, Any]) -> None:
        made = pod_of(securityProfile="Restricted", template=template(trainer(securityContext=own)))
        context = made["containers"][0]["securityContext"]
        assert own.items() <= context.items()
        assert context.get("allowPrivilegeEscalation") is not False

    def test_values_of_template_win_over_defaults(self) -> None:
        pod = pod_of(
            template=template(
                trainer(env=[{"name": "OMP_NUM_THREADS", "value": "3"}], resources={"limits": {"cpu": "8"}}),
                automountServiceAccountToken=True,
                terminationGracePeriodSeconds=7,
                metadata={"annotations": {"sidecar.istio.io/inject": "true"}},
            )
        )
        assert (pod["automountServiceAccountToken"], pod["terminationGracePeriodSeconds"]) == (True, 7)
        assert [e["value"] for e in pod["containers"][0]["env"] if e["name"] == "OMP_NUM_THREADS"] == ["3"]

    def test_proxies_of_meshes_are_kept_out_unless_template_wants_them(self) -> None:
        wanted = {"linkerd.io/inject": "enabled"}
        metadata = children(template=template(metadata={"annotations": wanted}))["Job"]["spec"]["template"]["metadata"]
        assert metadata["annotations"] == {
            "sidecar.istio.io/inject": "false",
            "linkerd.io/inject": "enabled",
            "consul.hashicorp.com/connect-inject": "false",
            "kuma.io/sidecar-injection": "disabled",
        }

    @pytest.mark.parametrize(
        ("written", "built"),
        [
            (None, "ClusterFirstWithHostNet"),
            ("ClusterFirst", "ClusterFirstWithHostNet"),
            ("Default", "Default"),
            ("None", "None"),
        ],
    )
    def test_pods_of_host_network_resolve_names_of_cluster(self, written: str | None, built: str) -> None:
        policy = {"dnsPolicy": written} if written else {}
        assert pod_of(template=template(hostNetwork=True, **policy))["dnsPolicy"] == built
        assert pod_of(template=template(**policy)).get("dnsPolicy") == written

    @pytest.mark.parametrize(
        ("cpu", "processes", "threads"), [("8", 2, "4"), ("1", 4, "1"), ("3500m", 1, "3"), (None, 1, None)]
    )
    def test_threads_are_cpus_of_process(self, cpu: str | None, processes: int, threads: str | None) -> None:
        limits = {"limits": {"cpu": cpu}} if cpu else None
        env = env_of(procPerNode=processes, template=template(trainer(resources=limits)))
        assert env.get("OMP_NUM_THREADS") == threads
        if cpu:  # of the pod, for a container without its own
            pod = template(trainer(resources={"requests": {"memory": "1Gi"}}), resources=limits)
            assert env_of(procPerNode=processes, template=pod).get("OMP_NUM_THREADS") == threads

    @pytest.mark.parametrize(
        ("checkpoint", "own", "pod", "workers"),
        [
            (None, None, 60, "30"),
            ({"path": "/c"}, None, 150, "120"),
            ({"path": "/c", "graceSeconds": 0}, None, 30, "0"),
            ({"path": "/c"}, 60, 60, "45"),
            ({"path": "/c"}, 600, 600, "120"),
            ({"path": "/c"}, 0, 0, "0"),
        ],
    )
    def test_launcher_has_time_for_termination_message(
        self, checkpoint: Any, own: int | None, pod: int, workers: str
    ) -> None:
        members = {} if own is None else {"terminationGracePeriodSeconds": own}
        spec = {"checkpoint": checkpoint, "template": template(**members)}
        assert pod_of(**spec)["terminationGracePeriodSeconds"] == pod
        assert env_of(**spec)["DDP_GRACE_SECONDS"] == workers

    @pytest.mark.parametrize(
        ("spec", "source"),
        [
            ({"checkpoint": {"path": "/c", "claimName": "ckpt"}}, {"persistentVolumeClaim": {"claimName": "ckpt"}}),
            ({"checkpoint": {"path": "/c"}}, {"emptyDir": {}}),
            ({}, None),
            (
                {
                    "checkpoint": {"path": "/c"},
                    "template": template(
                        trainer(volumeMounts=[{"name": "own", "mountPath": "/c/"}]), volumes=[{"name": "own"}]
                    ),
                },
                None,
            ),
        ],
        ids=["claim", "no claim", "no checkpoint", "own mount"],
    )
    def test_checkpoints_have_place(self, spec: dict[str, Any], source: Any) -> None:
        volumes = {volume["name"]: volume for volume in pod_of(**spec)["volumes"]}
        result = volumes.get(constants.CHECKPOINT_VOLUME)
        assert (result and {k: v for k, v in result.items() if k != "name"}) == source
        assert env_of(**spec).get("DDP_CHECKPOINT_DIR") == spec.get("checkpoint", {}).get("path")

    def test_checkpoints_in_store_have_disk_of_pod_and_their_credentials(self) -> None:
        store = {"path": "/c", "url": "s3://b/p", "secretRef": {"name": "access"}}
        pod = pod_of(checkpoint=store, template=template(trainer(envFrom=[{"configMapRef": {"name": "own"}}])))
        [container] = pod["containers"]
        assert [next(iter(source)) for source in container["envFrom"]] == ["secretRef", "configMapRef"]
        assert {"name": constants.CHECKPOINT_VOLUME, "emptyDir": {}} in pod["volumes"]
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert '"checkpoint":{"url":"s3://b/p","keep":3}' in env[constants.ENV_LAUNCHER_CONFIG]

    def test_shared_memory_is_volume_unless_user_defines_one(self) -> None:
        [own] = [v for v in pod_of(sharedMemory="8Gi")["volumes"] if v["name"] == constants.SHM_VOLUME]
        assert own["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        mounts = [{"name": "mine", "mountPath": "/dev/shm"}]
        pod = pod_of(template=template(trainer(volumeMounts=mounts), volumes=[{"name": "mine"}]))
        assert [v["name"] for v in pod["volumes"]] == ["mine", constants.LAUNCHER_VOLUME]

    def test_environment_contains_every_name_of_pod_contract(self) -> None:
        of_local_pods = {constants.ENV_LOCAL_POD, constants.ENV_PORT_FILE, constants.ENV_LIFELINE_FD}
        of_workers = {
            constants.ENV_RUNTIME_DIR,
            constants.ENV_AGENT_PID,
            constants.ENV_RUN_FD,
            constants.ENV_RANK_FEATURES,
        }
        ours = {value for name, value in vars(constants).items() if name.startswith("ENV_")}
        expected = ours - of_local_pods - of_workers - {constants.ENV_COMPLETION_INDEX, constants.ENV_INPUTS}
        # Those of features:
        expected -= {constants.ENV_TRACKING_RUN, constants.ENV_MEMORY_DIR, constants.ENV_MEMORY_INTERVAL}
        limits = {"limits": {"cpu": "1"}}
        patterns = {"logPatterns": ["(?P<step>.)"], "epochs": 2}
        made = template(trainer(resources=limits))
        env = env_of(checkpoint={"path": "/c"}, metrics=patterns, template=made)
        assert expected <= set(env)
        assert all(isinstance(value, str) for name, value in env.items() if name != constants.ENV_POD_IP)

    def test_pods_of_all_attempts_refer_to_secret_of_this_resource(self) -> None:
        typed = job(nodes=2)
        secrets = [build_children(typed, attempt=attempt, nodes=2)[0] for attempt in (1, 2)]
        assert secrets[0] == secrets[1]
        assert UID in secrets[0]["metadata"]["name"], "the Secret of a deleted job may still exist"
        assert secrets[0].keys().isdisjoint({"data", "stringData"}), "only the operator's call has the value"
        for attempt in (1, 2):
            [variable] = [item for item in pod_of(attempt=attempt)["containers"][0]["env"] if "SECRET" in item["name"]]
            reference = {"name": secrets[0]["metadata"]["name"], "key": "secret"}
            assert variable == {"name": "DDP_RENDEZVOUS_SECRET", "valueFrom": {"secretKeyRef": reference}}


class TestChildNames:
    @pytest.mark.parametrize(
        ("job_name", "ours"),
        [
            ("train-1", True),
            ("train-12", True),
            ("train-0", False),
            ("train-x", False),
            ("train-1-1", False),
            ("train", False),
        ],
    )
    def test_jobs_of_resource_are_known_by_name(self, job_name: str, ours: bool) -> None:
        assert child_names.is_attempt_name(job_name, "train") is ours
