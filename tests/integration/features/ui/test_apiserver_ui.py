"""The cluster side of `ddp ui` at a real API server: rows and pages by watches, no polling, and no further rights."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ddp_cli.client.api import connect, get_job
from ddp_cli.client.cluster_backend import find_events
from ddp_cli.client.errors import NotFound
from ddp_cli.features.ui.records import RecordedJobs
from ddp_cli.features.ui.rows import Attention
from ddp_cli.features.ui.sources import ClusterJobs
from ddp_operator.api import constants
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.record import Record, encode_record, name_record
from ddp_operator.features import SCHEMA
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.report import PodReport
from ddp_pod.features.history import store as history
from ddp_pod.features.points.launcher import PointKeeper
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.supervise.services import Services
from tests.support.builders import resource
from tests.support.control_plane import ControlPlane

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]
T = TypeVar("T")
POLICY = "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata, omitStages: [RequestReceived]}]\n"
CRD = Path(__file__).resolve().parents[4] / "deploy" / "crds" / "ddptrainingjobs.yaml"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("audited-plane")
    (folder / "policy.yaml").write_text(POLICY)
    flags = [f"--audit-policy-file={folder / 'policy.yaml'}", f"--audit-log-path={folder / 'audit.log'}"]
    with ControlPlane(folder, controllers=False, apiserver=flags) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(CRD))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        plane.kubectl("create", "namespace", "team")
        yield plane


def until(check: Callable[[], T | None]) -> T:
    """Return the first value that is true."""
    while True:
        value = check()
        if value:
            return value
        time.sleep(0.05)


def create(plane: ControlPlane, name: str) -> None:
    job = resource() | {"metadata": {"name": name, "namespace": "team"}}
    job.pop("status", None)
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(job))


def set_status(plane: ControlPlane, name: str, **status: Any) -> None:
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "ddp", name, "-n", "team", "--subresource=status", "--type=merge", "-p", patch)


def post_event(plane: ControlPlane, name: str, kind: str, about: str, message: str) -> None:
    uid = plane.kubectl("get", "ddp", name, "-n", "team", "-o", "jsonpath={.metadata.uid}").stdout
    involved = {"kind": kind, "name": about, "namespace": "team", **({"uid": uid} if kind != "Pod" else {})}
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{about}.{len(message)}", "namespace": "team"},
        "involvedObject": involved, "type": "Warning", "reason": "Stalled", "message": message,
        "lastTimestamp": "2026-11-29T10:00:00Z",
    }  # fmt: skip
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(event))


def read_verbs(plane: ControlPlane) -> Counter[tuple[str, str]]:
    """Return how often our client has used each verb on each resource."""
    lines = (plane.admin.parent / "audit.log").read_text().splitlines()
    ours = [entry for line in lines if "python" in (entry := json.loads(line)).get("userAgent", "").lower()]
    return Counter((entry["verb"], (entry.get("objectRef") or {}).get("resource", "")) for entry in ours)


def test_jobs_and_an_opened_job_follow_by_watches_alone(plane: ControlPlane) -> None:
    changes: list[int] = []
    jobs = ClusterJobs(
        connect(kubeconfig=str(plane.admin), namespace="team"), everywhere=False, on_change=lambda: changes.append(1)
    )
    create(plane, "one")
    jobs.start()
    assert until(jobs.refresh)["job/team/one"].phase == "Pending"

    set_status(plane, "one", phase="Running", attempt=1, progress={"step": 5, "totalSteps": 10, "percent": "50.0%"})
    until(lambda: jobs.refresh()["job/team/one"].percent == 50.0)
    page = jobs.read_page("job/team/one")
    assert (page.place, page.commands[0].text) == ("team", "ddp logs one -n team -f")

    before = jobs.sign("job/team/one")
    post_event(plane, "one", "DDPTrainingJob", "one", "rank 3 hangs")
    post_event(plane, "one", "Pod", "other-1-0-abcde", "of another job")
    until(lambda: jobs.read_page("job/team/one").run.events)
    assert jobs.sign("job/team/one") != before
    assert [event.message for event in jobs.read_page("job/team/one").run.events] == ["rank 3 hangs"]

    for step in range(6, 16):
        set_status(plane, "one", progress={"step": step})
    until(lambda: jobs.read_page("job/team/one").status.progress.step == 15)  # type: ignore[union-attr]
    create(plane, "two")
    set_status(plane, "two", phase="Failed", completionTime="2099-01-01T00:00:00Z")
    until(lambda: (row := jobs.refresh().get("job/team/two")) and row.attention is Attention.NEEDS_YOU)
    plane.kubectl("delete", "ddp", "one", "-n", "team")
    until(lambda: "job/team/one" not in jobs.refresh())
    with pytest.raises(NotFound, match="may have been deleted"):
        jobs.read_page("job/team/one")

    verbs = read_verbs(plane)
    assert verbs["list", "ddptrainingjobs"] == verbs["list", "pods"] == verbs["list", "events"] == 1
    assert not {verb for verb, _ in verbs} - {"list", "watch"}
    assert len(changes) > 10


def test_deleted_job_opens_from_the_record_that_the_operator_stores(plane: ControlPlane, tmp_path: Path) -> None:
    create(plane, "ended")
    failed = {"type": "Failed", "status": "True", "reason": "UserError", "message": "KeyError: 'x'"}
    failed |= {"lastTransitionTime": "2026-11-29T10:00:00Z"}
    end = {"phase": "Failed", "attempt": 1, "completionTime": "2026-11-29T10:00:00Z", "conditions": [failed]}
    set_status(plane, "ended", **end)
    post_event(plane, "ended", "DDPTrainingJob", "ended", "rank 3 hung")
    api = connect(kubeconfig=str(plane.admin), namespace="team")
    stored = get_job(api, "ended")
    record = encode_record(Record(resource=stored, events=tuple(find_events(api, stored))))
    history.main([record, str(tmp_path), name_record(parse_resource(stored, SCHEMA))])

    jobs = ClusterJobs(api, everywhere=False)
    jobs.start()
    until(lambda: "job/team/ended" in jobs.refresh())
    deleted = RecordedJobs(str(tmp_path), "team", lambda: api, "", lambda: None)
    deleted.read()
    plane.kubectl("delete", "ddp", "ended", "-n", "team")
    until(lambda: "job/team/ended" not in jobs.refresh())
    ((key, row),) = deleted.refresh().items()
    assert (row.name, row.attention, row.uid) == ("ended", Attention.DELETED, stored["metadata"]["uid"])
    page = deleted.read_page(key)
    assert "KeyError" in page.findings[0].what
    assert [event.message for event in page.run.events] == ["rank 3 hung"]


def find_own_address() -> str:
    """Return an address of this machine that is not its loopback, to which an API server connects for a pod."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def test_points_and_ranks_of_pod_0_are_read_through_the_api_server_at_the_port_of_the_spec(
    plane: ControlPlane, tmp_path: Path
) -> None:
    keeper = PointKeeper(RankReader(str(tmp_path)))
    for step in range(1, 301):
        keeper.add(RankProgress(step=float(step), steps=float(step), loss=1 / step), 1e9 + step)
    report = PodReport(ranks=(RankProgress(rank=0, step=300.0),))
    port = MetricsEndpoint(RankReader(str(tmp_path)), lambda ranks: report, Services([keeper]).read_page).serve(0)
    job = resource(metrics={"port": port}) | {"metadata": {"name": "curved", "namespace": "team"}}
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(job))
    rows = {"columns": "time,step,loss", "rows": ["1000000400,400,0.001"]}
    set_status(plane, "curved", phase="Running", attempt=1, history=rows)
    labels = {constants.LABEL_JOB_NAME: "curved", constants.LABEL_ATTEMPT: "1"}
    annotations = {constants.ANNOTATION_COMPLETION_INDEX: "0"}
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "curved-1-0-x", "namespace": "team", "labels": labels, "annotations": annotations},
        "spec": {"containers": [{"name": "trainer", "image": "example.com/train:1"}], "nodeName": "node-1"},
    }  # fmt: skip
    plane.kubectl("create", "serviceaccount", "default", "-n", "team")
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    address = find_own_address()
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "pod", "curved-1-0-x", "-n", "team", "--subresource=status", "--type=merge", "-p", patch)

    jobs = ClusterJobs(connect(kubeconfig=str(plane.admin), namespace="team"), everywhere=False)
    jobs.start()
    until(lambda: "job/team/curved" in jobs.refresh())
    jobs.renew("job/team/curved")
    until(lambda: len(jobs.read_page("job/team/curved").run.rows) > 300)
    page = jobs.read_page("job/team/curved")
    assert page.ranks_note == ""
    assert [row.step for row in page.ranks] == [300.0]
    assert [row["step"] for row in page.run.rows] == [*map(float, range(1, 301)), 400.0]


def test_user_without_rights_sees_the_reason_and_its_remedy(plane: ControlPlane) -> None:
    plane.kubectl("create", "serviceaccount", "guest", "-n", "team")
    kubeconfig = plane.account("team", "guest")
    jobs = ClusterJobs(connect(kubeconfig=str(kubeconfig), namespace="team"), everywhere=True)
    jobs.start()
    assert "ask the cluster's administrator" in until(lambda: jobs.problem)
    assert jobs.refresh() == {}


def test_user_who_may_read_jobs_only_has_the_page_of_a_job(plane: ControlPlane) -> None:
    plane.kubectl("create", "serviceaccount", "reader", "-n", "team")
    plane.kubectl("create", "role", "reader", "-n", "team", "--verb=get,list,watch", "--resource=ddptrainingjobs")
    plane.kubectl("create", "rolebinding", "reader", "-n", "team", "--role=reader", "--serviceaccount=team:reader")
    create(plane, "three")
    kubeconfig = plane.account("team", "reader")
    jobs = ClusterJobs(connect(kubeconfig=str(kubeconfig), namespace="team"), everywhere=False)
    jobs.start()
    until(jobs.refresh)
    page = jobs.read_page("job/team/three")
    assert page.findings[0].what.startswith("New") or "No operator" in page.findings[0].what
    assert "cannot be read" in until(lambda: jobs.read_page("job/team/three").ranks_note)
