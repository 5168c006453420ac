"""A profile's locked fields hold in all pods of a job, for every field of the spec that adds to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ddp_cli.client.claim import build_pod
from ddp_operator.api.errors import FieldError
from ddp_operator.api.locks import compared_form, select, split_lock
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.profile import complete_spec, read_profile
from ddp_operator.api.status import Profile
from ddp_operator.manifests.locked_pods import keep_locked_pods
from ddp_operator.manifests.pod import build_fetch_template, build_pod_template
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import profile, resource, template, trainer

PLACE = {
    "runtimeClassName": "gvisor",
    "nodeSelector": {"team": "a", "nvidia.com/gpu.product": "H100"},
    "affinity": {"nodeAffinity": {"x": "y"}},
    "topologySpreadConstraints": [{"topologyKey": "zone"}],
    "tolerations": [{"key": "team"}],
    "schedulerName": "ours",
}
BASE: dict[str, Any] = {
    "template": template(trainer(command=["python", "train.py"], resources={"limits": {"cpu": "4"}}))
}
CACHE = [{"url": "https://h/f", "mountPath": "/data", "nodeCache": {"path": "/etc"}}]
CLAIM = [{"url": "https://h/f", "mountPath": "/data", "claimName": "theirs"}]
CODE = {"digest": "0" * 64, "claimName": "theirs", "path": "code.tar.gz"}
SECRET = {"secretRef": {"name": "theirs"}}
ADDING: list[dict[str, Any]] = [
    {"inputs": CACHE},
    {"inputs": CLAIM},
    {"checkpoint": {"path": "/ckpt", "claimName": "theirs"}},
    {"checkpoint": {"path": "/ckpt"}},
    {"checkpoint": {"path": "/ckpt", "url": "s3://b/p", **SECRET}},
    {"code": CODE},
    {"network": {"profile": "tcpxo"}},
    {"network": {"profile": "ib"}},
    {"network": {"profile": "efa"}},
    {"network": {"profile": "socket"}},
    {"scheduling": {"gang": "Volcano"}},
    {"scheduling": {"schedulerName": "theirs"}},
    {"scheduling": {"priorityClassName": "theirs"}},
    {"scheduling": {"placement": "Pack"}},
    {"scheduling": {"placement": "Spread", "topologyKey": "zone"}},
    {"securityProfile": "Restricted"},
    {"tracking": {"mlflow": {"trackingUri": "http://m", **SECRET}}},
    {"tracking": {"wandb": {"project": "p", **SECRET}}},
]
# Parts of a pod that the operator adds, without values of the job.
OWN = {"args", "command", "env", "initContainers", "ports", "terminationGracePeriodSeconds", "workingDir"}


def complete(
    own: dict[str, Any], source: Profile, annotations: dict[str, str] | None = None
) -> tuple[dict[str, Any], list[FieldError]]:
    """Return a resource completed by a profile, and the errors of its locked fields."""
    spec, errors = complete_spec({"nodes": 2, **own}, source)
    resource_ = resource(annotations=annotations)
    kept, changes = keep_locked_pods({**resource_, "spec": spec}, source)
    return dict(kept), errors + changes


def build_training_pod(spec: dict[str, Any], locked: tuple[str, ...] = ()) -> dict[str, Any]:
    job = parse_resource({**resource(), "spec": {"nodes": 2, **spec}}, locked=locked)
    built = build_pod_template(job, resolve_template(job), "0" * 64, attempt=1, nodes=2)
    return dict(built["spec"])


def build_fetch(spec: dict[str, Any], locked: tuple[str, ...] = ()) -> dict[str, Any]:
    job = parse_resource({**resource(), "spec": {"nodes": 2, **spec}}, locked=locked)
    return dict(build_fetch_template(job, resolve_template(job), "0" * 64)["spec"])


def list_changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the members of two pods and of their training containers that differ, in the form of locked fields."""
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    [container] = before["containers"]
    [second] = after["containers"]
    inside = {name for name in container.keys() | second.keys() if container.get(name) != second.get(name)}
    return (changed - {"containers"} - OWN) | {f"containers[trainer].{name}" for name in inside - OWN}


@pytest.mark.parametrize("own", ADDING, ids=str)
def test_lock_on_pod_field_refuses_changing_field(own: dict[str, Any]) -> None:
    without = build_training_pod(BASE)
    changed = list_changed(without, build_training_pod({**BASE, **own}))
    for part in changed:
        lock = f"template.spec.{part}"
        kept, errors = complete(own, read_profile(profile(BASE, lock)))
        assert errors, f"{lock} is changed by {own}"
        assert part not in list_changed(without, build_training_pod(kept["spec"]))
        assert all(f"changes {lock}" in error.message for error in errors)
    assert changed or own == {"network": {"profile": "socket"}}


@pytest.mark.parametrize(
    ("lock", "own"),
    [
        ("template.spec.nodeSelector", {"inputs": CLAIM}),
        ("template.spec.volumes[data]", {"inputs": CLAIM}),
        ("template.spec.schedulerName", {"scheduling": {"gang": "None"}}),
        ("template.spec.securityContext", {"securityProfile": "Default"}),
    ],
    ids=["other member", "other volume", "default gang", "default profile"],
)
def test_lock_on_pod_field_accepts_other_field(lock: str, own: dict[str, Any]) -> None:
    assert complete(own, read_profile(profile(BASE, lock)))[1] == []


def test_grace_time_of_checkpoint_is_refused_where_that_of_pods_is_locked_and_unset() -> None:
    lock = "template.spec.terminationGracePeriodSeconds"
    own = {"checkpoint": {"path": "/ckpt", "graceSeconds": 9000}}
    kept, [error] = complete(own, read_profile(profile(BASE, lock)))
    assert error.path == "spec.checkpoint"
    assert "checkpoint" not in kept["spec"]
    base = {"template": template(trainer(command=["x"]), terminationGracePeriodSeconds=60)}
    assert complete(own, read_profile(profile(base, lock)))[1] == []


def test_volume_lock_accepts_profile_inputs_and_refuses_others() -> None:
    theirs = read_profile(profile({**BASE, "inputs": CLAIM}, "template.spec.volumes"))
    assert complete({"inputs": CLAIM}, theirs)[1] == []
    kept, [error] = complete({"inputs": CACHE}, theirs)
    assert kept["spec"]["inputs"] == CLAIM
    assert str(error) == (
        "spec.inputs: changes template.spec.volumes of the pods, which ClusterDDPTrainingProfile gpu locks; leave it "
        "out, or name another profile"
    )


LOCKED: dict[str, Any] = {
    "template": template(
        trainer(
            name="main",
            command=["x"],
            env=[{"name": "A", "value": "1"}],
            resources={"limits": {"memory": "8Gi"}},
            securityContext={"runAsUser": 1000},
            volumeMounts=[{"name": "v", "mountPath": "/data", "readOnly": True}],
        ),
        securityContext={"runAsNonRoot": True},
        volumes=[{"name": "v", "emptyDir": {}}],
    )
}
RENAMED = {"name": "other", "image": "i", "command": ["y"]}
USER = "template.spec.containers[trainer].securityContext.runAsUser"
DATA = "template.spec.containers[trainer].volumeMounts[/data]"
VARIABLE = "template.spec.containers[trainer].env[A]"
ACCOUNT = "template.spec.serviceAccountName"
ANNOTATION = "template.metadata.annotations"
TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
APPARMOR = "container.apparmor.security.beta.kubernetes.io/trainer"


def mount(path: str) -> dict[str, Any]:
    """Return a template that mounts a further volume at a path."""
    added = trainer(volumeMounts=[{"name": "w", "mountPath": path}])
    return template(added, volumes=[{"name": "w", "emptyDir": {}}])


@pytest.mark.parametrize(
    ("lock", "own"),
    [
        (USER, template({"$patch": "replace"}, RENAMED)),
        (USER, {"$patch": "replace", "spec": {"containers": [RENAMED]}}),
        (USER, {"spec": {"$patch": "replace", "containers": [RENAMED]}}),
        (USER.replace("trainer", "main"), template({**RENAMED, "securityContext": {"runAsUser": 0}})),
        (USER.replace("trainer", "main"), template({**RENAMED, "securityContext": {"$patch": "replace"}})),
        (USER.replace("securityContext.", "securityContext.["), template({**RENAMED, "securityContext": None})),
        ("template.spec.containers[trainer].resources", template({**RENAMED, "resources": {"$patch": "delete"}})),
        ("template.spec.securityContext", template(trainer(securityContext={"runAsNonRoot": False}))),
        ("template.spec.securityContext.seccompProfile.type",
         template(trainer(securityContext={"seccompProfile": {"type": "Unconfined"}}))),
        ("template.spec.securityContext.runAsUser",
         template(trainer(), initContainers=[{"name": "s", "image": "i", "securityContext": {"runAsUser": 0}}])),
        (VARIABLE, template(trainer(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]))),
        (VARIABLE, template(trainer(env=[{"name": "A", "value": "2"}, {"name": "A", "value": "1"}]))),
        (f"{VARIABLE}.value", template(trainer(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]))),
        (VARIABLE.replace("A", "B"), template(trainer(env=[{"name": "B", "value": "1"}] * 2))),
        (ACCOUNT, template(trainer(), serviceAccount="admin")),
        ("template.spec.serviceAccount", template(trainer(), serviceAccountName="admin")),
        ("template.spec[serviceAccountName]", template(trainer(), serviceAccount="admin")),
        (DATA, mount("/data/")),
        (DATA, mount("//data")),
        (DATA, mount("data")),
        (DATA, mount("/x/../data/.")),
        (DATA.replace("/data", "/data/"), mount("/data")),
        (DATA.replace("/data", "v"), template(trainer(volumeMounts=[{"name": "v", "mountPath": "/other"}]))),
        (DATA.replace("/data", "/new"), mount("/new/")),
        (ANNOTATION, template(metadata={"annotations": {"a": "b"}})),
        ("template.metadata.labels", template(metadata={"labels": {"a": "b"}})),
        (USER.replace("runAsUser", "appArmorProfile"), template(metadata={"annotations": {APPARMOR: "unconfined"}})),
    ],
    ids=str,
)  # fmt: skip
def test_lock_holds_for_every_notation_of_a_value(lock: str, own: dict[str, Any]) -> None:
    source = read_profile(profile(LOCKED, lock))
    base_pod = compared_form({"template": LOCKED["template"]})
    kept, errors = complete({"template": own}, source)
    assert [error.path for error in errors] == [f"spec.{lock}"]
    steps = split_lock(lock, "main")
    assert select(compared_form(kept["spec"]), steps) == select(base_pod, steps)


@pytest.mark.parametrize("lock", [ANNOTATION, f"{ANNOTATION}[{TOPOLOGY}]", "template.metadata", "template"])
def test_lock_on_pod_metadata_refuses_annotations_and_labels_of_other_fields(lock: str) -> None:
    source = read_profile(profile(LOCKED, lock))
    kept, [error] = complete({}, source, {TOPOLOGY: "rack", "mine": "x"})
    assert error.path == "metadata.annotations[kueue.x-k8s.io/podset-*]"
    assert kept["metadata"]["annotations"] == {"mine": "x"}
    assert complete({}, source, {"mine": "x"})[1] == []


def test_fields_that_hide_each_other_are_both_refused() -> None:
    own = {"nodes": 1, "elastic": {"minNodes": 1, "maxNodes": 2}, "network": {"profile": "ib"}}
    source = read_profile(profile(LOCKED, "template.spec.containers[trainer].resources"))
    kept, errors = complete(own, source)
    assert errors
    changed = list_changed(build_training_pod(LOCKED), build_training_pod(kept["spec"]))
    assert "containers[trainer].resources" not in changed


@pytest.mark.parametrize("inputs", [CLAIM, CACHE], ids=["claim", "cache"])
@pytest.mark.parametrize("lock", [*(f"template.spec.{name}" for name in PLACE), "template.spec", "template"])
def test_fetching_pod_keeps_locked_fields(inputs: list[Any], lock: str) -> None:
    spec = {"template": template(trainer(command=["x"]), **copy.deepcopy(PLACE)), "inputs": inputs}
    pod = build_fetch(spec, (lock,))
    for name in [lock.removeprefix("template.spec.")] if lock.count(".") > 1 else PLACE:
        if name == "affinity":
            assert pod["affinity"]["nodeAffinity"] == PLACE["affinity"]["nodeAffinity"]  # type: ignore[index]
        else:
            assert pod[name] == PLACE[name]


def test_pod_that_fetches_inputs_keeps_locked_label_of_nodes_only() -> None:
    spec = {"template": template(trainer(command=["x"]), **copy.deepcopy(PLACE)), "inputs": CLAIM}
    assert build_fetch(spec, ("template.spec.nodeSelector.team",))["nodeSelector"] == {"team": "a"}
    assert "nodeSelector" not in build_fetch(spec)


def test_pod_that_puts_code_on_claim_keeps_place_of_template() -> None:
    from pathlib import Path
    from types import SimpleNamespace

    job = parse_resource(resource(template=template(trainer(command=["x"]), **copy.deepcopy(PLACE))))
    code: Any = SimpleNamespace(archive=SimpleNamespace(digest="0" * 64), spec=CODE, folder=Path())
    pod = build_pod(code, resolve_template(job))["spec"]
    assert {name: pod.get(name) for name in PLACE if name != "topologySpreadConstraints"} == {
        name: value for name, value in PLACE.items() if name != "topologySpreadConstraints"
    }
