"""The operator's role permits exactly the calls that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from ddp_operator.api.constants import KIND
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND, PROFILE_KIND
from ddp_operator.features import SCHEMA, build_definitions
from ddp_operator.features.waiting import polling
from ddp_operator.kube.resources import plural
from ddp_operator.kube.startup_checks import HOME_PERMISSIONS, list_permissions, split_permission
from tests.support.builders import job_manifest, profile
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn
from tests.support.standin.kueue import LOCAL_QUEUE, WORKLOAD
from tests.support.standin.resources import custom_kind

from .test_operator_recovery import quick_to_stop

USED_ELSEWHERE = {
    ("delete", "leases"),  # an admission plug-in of the API server requires it
    ("patch", plural(KIND)),  # of a job that holds GPUs for minutes: contract/test_resource_contract.py
    # Of jobs in two clusters: contract/test_multikueue.py
    *((verb, "workloads") for verb in ("get", "create", "patch", "delete")),
    *(("patch", "workloads/status"), ("get", "resourceflavors"), ("get", "workloadpriorityclasses")),
    # Of optional APIs: unit/…/features/drains/test_requests.py and queue_estimate/test_reader.py
    *(("list", "evictions"), ("patch", "evictions/status"), ("list", "localqueues"), ("get", "clusterqueues")),
}


def named(permissions: Mapping[str, Sequence[str]]) -> set[tuple[str, str]]:
    """Return verb and resource of every permission."""
    return {
        (verb, f"{plural(kind)}/{sub}" if sub else plural(kind))
        for resource, verbs in permissions.items()
        for kind, sub, _ in [split_permission(resource)]
        for verb in verbs
    }


def prepare_server(server: StandIn) -> None:
    """Serve the optional kinds, and inject the faults after which the operator makes its rarest calls."""
    # After a lost response the operator's own object exists already, and the operator reads it, unless it is a Secret.
    # The first job's Job and the dry runs of the second job, which has a NetworkPolicy, precede these calls.
    for resource, nth in (("services", 1), ("configmaps", 1), ("networkpolicies", 2), ("jobs", 3), ("secrets", 1)):
        server.faults.add("lost answer", verb="create", resource=resource, name="", nth=nth)
    # After a conflict on a deletion the operator reads whether the object still exists.
    for resource, nth in (("pods", 2), ("jobs", 1), (plural(KIND), 1)):  # the test deletes the first pod
        server.faults.add(409, verb="delete", resource=resource, nth=nth)
    server.serve(WORKLOAD)
    server.serve(LOCAL_QUEUE)
    for kind in (PROFILE_KIND, CLUSTER_PROFILE_KIND):
        server.serve(custom_kind(build_definitions()[kind]))


async def test_each_permission_is_used_and_no_other_call_occurs(
    server: StandIn, actors: ClusterActors, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life with every event: lost responses, a lost node, another attempt, a suspension, the end of its time."""

    def used() -> set[tuple[str, str]]:
        return {(verb, resource) for verb, resource, _ in server.calls_of("operator")}

    async def until_used(verb: str, resource: str) -> None:
        await actors.until(lambda: (verb, resource) in used(), f"{verb} {resource}")

    prepare_server(server)
    running = start(kubeconfig=str(server.write_kubeconfig(tmp_path, "operator")))

    monkeypatch.setattr(polling, "_PATIENCE", timedelta(0))  # queries the Events of a Job without pods
    job_controller = server.controllers.job_controller
    server.controllers.job_controller = None
    await actors.create(job_manifest("stuck"))
    await until_used("list", "events")
    queued = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "spec": {"suspend": True}}
    await actors.patch("Job", "stuck-1", queued)  # as Kueue would
    await until_used("list", "workloads")
    await until_used("get", "localqueues")
    server.controllers.job_controller = job_controller

    recovery = {"forceDeleteAfterSeconds": 0}
    await actors.create(
        job_manifest(
            networkPolicy={"enabled": True},
            recovery=recovery,
            template=quick_to_stop(),
            ttlSecondsAfterFinished=0,
            history={"url": "s3://team/history"},
        )
    )
    for index in (0, 1):
        await actors.run_pod("digits-1", index, node=f"node-{index}")
    await actors.phase("digits", "Running")
    server.controllers.ends_pods = False
    await actors.delete("Pod", (await actors.pod("digits-1", 1))["metadata"]["name"])
    await actors.child_job("digits-2")
    server.controllers.ends_pods = True
    await actors.patch(KIND, "digits", {"spec": {"suspend": True}})
    await actors.phase("digits", "Suspended")
    await actors.patch(KIND, "digits", {"spec": {"suspend": False}})
    for index in (0, 1):
        await actors.run_pod("digits-2", index)
    for index in (0, 1):
        await actors.finish_pod("digits-2", index)
    await actors.run_pod("digits-history", 0)
    await actors.finish_pod("digits-history", 0)
    await actors.gone(KIND, "digits")
    await actors.create(profile({}, kind=PROFILE_KIND))
    for kind in (PROFILE_KIND, CLUSTER_PROFILE_KIND):
        await actors.create(job_manifest(kind[:3].lower(), profileRef={"kind": kind, "name": "gpu"}))
        await until_used("get", plural(kind))
    await until_used("create", plural(KIND))
    running.stop()

    expected = (named(list_permissions(SCHEMA.shared_kinds)) | named(HOME_PERMISSIONS)) - USED_ELSEWHERE
    assert used() - expected == set(), "calls that the role does not allow"
    assert expected - used() == set(), "permissions that nothing needs"
