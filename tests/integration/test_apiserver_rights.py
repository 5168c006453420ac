"""A real API server must refuse forbidden calls: of the operator's account, of users, and by admission."""

from __future__ import annotations

import copy
import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from ddp_cli.client.validation import check_manifest
from tests.support import ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import ControlPlane

from .test_apiserver_operator import namespace

__all__ = ["namespace"]  # a fixture
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]

OURS = "/apis/ddp-operator.dev/v1alpha1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
HOME = "ddp-operator"
SAMPLES = sorted((ROOT / "deploy/samples").glob("*.yaml"))
REFUSED: list[tuple[str, str, Any]] = [
    # Secrets.
    ("GET", "/api/v1/secrets", None),
    ("GET", f"/api/v1/namespaces/{HOME}/secrets/any", None),
    ("GET", "/api/v1/namespaces/default/secrets?watch=true&timeoutSeconds=1", None),
    ("PATCH", "/api/v1/namespaces/default/secrets/any", {"stringData": {"a": "b"}}),
    ("DELETE", "/api/v1/namespaces/default/secrets/any", None),
    ("POST", f"/api/v1/namespaces/{HOME}/serviceaccounts/ddp-operator/token", {"spec": {}}),
    ("POST", f"/api/v1/namespaces/{HOME}/serviceaccounts", {"metadata": {"name": "any"}}),
    # Programs in pods; the operator may create pods, because it may create Jobs.
    ("POST", "/api/v1/namespaces/default/pods/any/exec?command=id", None),
    ("POST", "/api/v1/namespaces/default/pods/any/attach", None),
    ("POST", "/api/v1/namespaces/default/pods/any/portforward", None),
    ("GET", "/api/v1/namespaces/default/pods/any/proxy/", None),
    ("PATCH", "/api/v1/namespaces/default/pods/any", {"metadata": {"labels": {"a": "b"}}}),
    ("POST", "/apis/apps/v1/namespaces/default/daemonsets", {"metadata": {"name": "any"}}),
    ("PATCH", f"/apis/apps/v1/namespaces/{HOME}/deployments/ddp-operator", {"spec": {"replicas": 9}}),
    # Other owners' objects.
    ("PATCH", "/api/v1/namespaces/default/services/any", {"spec": {"selector": {"a": "b"}}}),
    ("DELETE", "/api/v1/namespaces/default/services/any", None),
    ("PATCH", "/api/v1/namespaces/default/configmaps/any", {"data": {"a": "b"}}),
    ("DELETE", "/api/v1/namespaces/default/configmaps/any", None),
    ("PATCH", "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/any", {"spec": {}}),
    ("DELETE", "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/any", None),
    ("GET", "/api/v1/namespaces/default/persistentvolumeclaims", None),
    ("DELETE", "/api/v1/namespaces/default/events/any", None),
    ("PATCH", "/apis/batch/v1/namespaces/default/jobs/any/status", {"status": {}}),
    # The user's requests belong to the user.
    ("PATCH", f"{OURS}/namespaces/default/ddptrainingjobs/any/scale", {"spec": {"replicas": 9}}),
    # The cluster.
    ("GET", "/api/v1/namespaces", None),
    ("DELETE", "/api/v1/namespaces/any", None),
    ("GET", "/api/v1/nodes", None),
    ("PATCH", "/api/v1/nodes/node-0", {"spec": {"unschedulable": True}}),
    ("DELETE", "/api/v1/nodes/node-0", None),
    ("GET", "/api/v1/nodes/node-0/proxy/pods", None),
    ("DELETE", "/api/v1/persistentvolumes/any", None),
    ("PATCH", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ddptrainingjobs.ddp-operator.dev", {"spec": {}}),
    ("POST", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", {"metadata": {"name": "any"}}),
    # More rights.
    ("PATCH", f"{RBAC}/clusterroles/ddp-operator", {"rules": []}),
    ("POST", f"{RBAC}/clusterrolebindings", {"metadata": {"name": "any"}, "roleRef": {}}),
    ("POST", f"{RBAC}/namespaces/default/rolebindings", {"metadata": {"name": "any"}, "roleRef": {}}),
    # Leases outside its own namespace.
    ("GET", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/any", None),
    ("DELETE", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/any", None),
]  # fmt: skip

Ask = Callable[..., tuple[int, Any]]


@contextmanager
def asking(kubeconfig: Path) -> Iterator[Ask]:
    """Return a function that calls the API server as this user, as a dry run, so that it changes nothing."""
    config = yaml.safe_load(kubeconfig.read_text())
    (cluster,) = config["clusters"]
    (user,) = config["users"]
    context = ssl.create_default_context(cafile=str(kubeconfig.parent / cluster["cluster"]["certificate-authority"]))
    headers = {"Accept": "application/json"}
    if "tokenFile" in user["user"]:
        token = (kubeconfig.parent / user["user"]["tokenFile"]).read_text().strip()
        headers["Authorization"] = f"Bearer {token}"
    else:
        files = (user["user"]["client-certificate"], user["user"]["client-key"])
        context.load_cert_chain(*(str(kubeconfig.parent / name) for name in files))
    address = urlsplit(cluster["cluster"]["server"])
    connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=context, timeout=30)

    def ask(method: str, path: str, body: Any = None, *, dry: bool = True, **more: str) -> tuple[int, Any]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        question = path + ("&" if "?" in path else "?") * dry + "dryRun=All" * dry
        text = None if body is None else json.dumps(body)
        connection.request(method, question, text, {**headers, "Content-Type": kind, **more})
        answer = connection.getresponse()
        read = answer.read()
        try:
            return answer.status, json.loads(read)
        except ValueError:
            return answer.status, read

    with closing(connection):
        yield ask


@pytest.fixture(scope="module")
def admin(plane: ControlPlane) -> Iterator[Ask]:
    with asking(plane.admin) as ask:
        yield ask


@pytest.fixture(scope="module")
def operator(plane: ControlPlane) -> Iterator[Ask]:
    with asking(plane.account(HOME, "ddp-operator")) as ask:
        yield ask


@pytest.mark.parametrize(("method", "path", "body"), REFUSED, ids=[f"{method} {path}" for method, path, _ in REFUSED])
def test_account_of_operator_lacks_right(operator: Ask, admin: Ask, method: str, path: str, body: Any) -> None:
    status, answer = operator(method, path, body)
    assert (status, answer["reason"]) == (403, "Forbidden"), answer
    assert f"system:serviceaccount:{HOME}:ddp-operator" in answer["message"]
    # The missing right is the reason: no path is refused because it is mistyped.
    assert admin(method, path, body)[0] != 403


def test_account_of_operator_creates_secret_and_never_sees_it(operator: Ask, admin: Ask, namespace: str) -> None:
    where = f"/api/v1/namespaces/{namespace}/secrets"
    secret = {"metadata": {"name": "train-rendezvous-1"}, "immutable": True, "stringData": {"secret": "first"}}
    assert operator("POST", where, secret, dry=False)[0] == 201
    status, answer = operator("POST", where, secret | {"stringData": {"secret": "second"}}, dry=False)
    assert (status, answer["reason"]) == (409, "AlreadyExists")
    for method in ("GET", "DELETE"):
        assert operator(method, f"{where}/train-rendezvous-1")[0] == 403
    assert admin("GET", f"{where}/train-rendezvous-1")[1]["data"] == {"secret": "Zmlyc3Q="}


def test_account_of_operator_cannot_impersonate(operator: Ask, admin: Ask) -> None:
    for ask, expected in ((operator, 403), (admin, 200)):
        status, answer = ask(
            "GET", "/api/v1/nodes", **{"Impersonate-User": "root", "Impersonate-Group": "system:masters"}
        )
        assert status == expected, answer


@pytest.mark.parametrize(
    ("role", "verb", "resource", "allowed"),
    [
        ("view", "list", "ddptrainingjobs", True),
        ("view", "create", "ddptrainingjobs", False),
        ("view", "patch", "ddptrainingjobs/scale", False),
        ("edit", "create", "ddptrainingjobs", True),
        ("edit", "patch", "ddptrainingjobs/scale", True),
        # An account that may write a status could forge one: the node of a job, its cost, the cause of its failure.
        ("edit", "update", "ddptrainingjobs/status", False),
        ("admin", "patch", "ddptrainingjobs/status", False),
    ],
)
def test_users_have_rights_of_their_role(
    plane: ControlPlane, admin: Ask, namespace: str, role: str, verb: str, resource: str, allowed: bool
) -> None:
    if not plane.has_controllers:
        pytest.skip("no kube-controller-manager, which adds the chart's roles to view, edit and admin")
    user = f"user-{role}"
    binding = {
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    assert admin("POST", f"{RBAC}/namespaces/{namespace}/rolebindings", binding, dry=False)[0] == 201

    def may(verb: str, resource: str, where: str) -> bool:
        main, _, sub = resource.partition("/")
        asked = {"verb": verb, "group": "ddp-operator.dev", "resource": main, "subresource": sub, "namespace": where}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        review = {"spec": {"resourceAttributes": asked}}
        status, answer = admin("POST", path, review, dry=False, **{"Impersonate-User": user})
        assert status == 201, answer
        return bool(answer["status"]["allowed"])

    deadline = time.monotonic() + 60
    while not may("list", "ddptrainingjobs", namespace):  # each of the roles permits it
        assert time.monotonic() < deadline, "the API server's authorizer never learns of the role binding"
        time.sleep(0.1)
    assert may(verb, resource, namespace) is allowed
    assert not may(verb, resource, "kube-system")


@pytest.fixture(scope="module", params=["baseline", "restricted"])
def standard(plane: ControlPlane, request: pytest.FixtureRequest) -> str:
    """A namespace that enforces a standard; its name is the standard's."""
    name = str(request.param)
    label = f"pod-security.kubernetes.io/enforce={name}"
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"pods-{name}"}}
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    plane.kubectl("label", "--overwrite", "namespace", f"pods-{name}", label)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    plane.kubectl("apply", "-n", f"pods-{name}", "-f", "-", stdin=yaml.safe_dump(account))
    return name


class TestPodSecurity:
    """The API server's own admission, with the namespace's label `enforce`."""

    def admitted(self, admin: Ask, standard: str, manifest: dict[str, Any]) -> tuple[int, Any]:
        """Create a pod of each of the job's Jobs as the Job controller would. Return a response or a refusal."""
        jobs = [child for child in check_manifest(yaml.safe_dump(manifest)).children if child["kind"] == "Job"]
        assert jobs
        for number, job in enumerate(jobs):
            template = copy.deepcopy(dict(job["spec"]["template"]))
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": template["spec"]}
            status, answer = admin("POST", f"/api/v1/namespaces/pods-{standard}/pods", pod)
            if status != 201:
                break
        return status, answer

    @pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
    def test_pods_of_every_sample(self, admin: Ask, standard: str, path: Path) -> None:
        (manifest,) = (result for result in yaml.safe_load_all(path.read_text()) if result["kind"] == "DDPTrainingJob")
        manifest["metadata"].pop("namespace", None)
        status, answer = self.admitted(admin, standard, manifest)
        if manifest["spec"].get("preflight"):  # memory locked for InfiniBand: see docs/scaling.md
            assert status == 403
            assert "IPC_LOCK" in answer["message"]
            return
        if standard == "restricted" and manifest["spec"].get("securityProfile") != "Restricted":
            # So the standard is enforced, and the profile is sufficient.
            assert status == 403
            assert 'violates PodSecurity "restricted' in answer["message"]
            manifest["spec"]["securityProfile"] = "Restricted"
            status, answer = self.admitted(admin, standard, manifest)
        assert status == 201, answer
        # The API server's own admission has mounted no token into it.
        assert not [volume for volume in answer["spec"].get("volumes", []) if "projected" in volume]

    def test_namespace_policy_refuses_privileged_template(self, admin: Ask, standard: str) -> None:
        manifest = job_manifest()
        manifest["spec"]["template"]["spec"]["hostNetwork"] = True
        status, answer = self.admitted(admin, standard, manifest)
        assert status == 403
        assert "host namespaces" in answer["message"]
