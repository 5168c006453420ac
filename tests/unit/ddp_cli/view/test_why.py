"""`ddp why` as a pure function: which of several problems it reports, in whose message, and with what remedy."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import pairwise
from typing import Any, get_args

import pytest

from ddp_cli.view.why import (
    REMEDIES,
    LeaseRenewal,
    Why,
    describe_stragglers,
    explain_why,
    omit_cluster_advice,
)
from ddp_operator.api import other_kinds
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status, Straggler, StragglerCause
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts, other_reasons
from ddp_pod.contract.failure_table import OOM
from tests.support.builders import NOW


def condition(kind: str, status: str, reason: str, message: str = "", *, age: int = 60) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_time(NOW - timedelta(seconds=age)),
    }


def job(*conditions: dict[str, Any], age: int = 600, **status: Any) -> dict[str, Any]:
    metadata = {"name": "x", "creationTimestamp": format_time(NOW - timedelta(seconds=age))}
    if conditions:
        status["conditions"] = list(conditions)
    return {"metadata": metadata, "spec": {}, **({"status": status} if status else {})}


def event(message: str, kind: str = "Warning", reason: str = "FailedScheduling") -> dict[str, Any]:
    return {"type": kind, "reason": reason, "message": message}


def why(*conditions: dict[str, Any], events: tuple[dict[str, Any], ...] = (), **status: Any) -> Why:
    return explain_why(job(*conditions, **status), events, NOW)


FAILURE = {
    "attempt": 2,
    "rank": 3,
    "pod": "x-2-1-abcde",
    "nodeName": "node-b",
    "exitCode": 1,
    "category": "UserError",
    "message": "FileNotFoundError: no such file: 'train.csv'",
    "remedy": "check the path of the data",
    "conclusion": "failed 4 times, recovery.maxRestarts is 3",
}
HELD_UNTIL = {"releaseTime": format_time(NOW + timedelta(minutes=29))}
FAILED = condition("Failed", "True", "RestartBudgetExhausted", "failed 4 times, recovery.maxRestarts is 3; last: …")


def test_estimate_of_queue_is_relative_to_now() -> None:
    times = {"startP50": format_time(NOW + timedelta(minutes=40)), "startP90": format_time(NOW + timedelta(minutes=80))}
    place = {"clusterQueue": "gpu", "position": 3, "of": 17, **times}
    waits = condition(c.SCHEDULED, "False", "QuotaPending", "position 3/17")
    assert "position 3/17. Expected in 40m, with 90% within 80m. " in str(why(waits, queue=place))
    assert "with 90%" not in str(why(waits))


# Messages of Kubernetes 1.36, and a part of the remedy.
FORBIDDEN = (
    (
        'Internal error occurred: failed calling webhook "pods.corp.example": failed to call webhook: Post '
        '"https://127.0.0.1:9/validate?timeout=3s": dial tcp 127.0.0.1:9: connect: connection refused',
        "The admission webhook pods.corp.example does not respond",
    ),
    ('admission webhook "pods.corp.example" denied the request: no team', "change what its message demands"),
    (
        "pods \"x-1-0\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
        "its message demands",
    ),
    ('pods "x-1-0" is forbidden: exceeded quota: team, requested: pods=1, used: pods=9', "resourcequota team."),
    ('pods "x-1-0" is forbidden: failed quota: strict: must specify limits.cpu for: trainer', "their resources"),
    ('pods "x-1-0" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi', "limitrange."),
    (
        'pods "x-1-" is forbidden: error looking up service account d/bot: serviceaccount "bot" not found',
        "kubectl create serviceaccount bot)",
    ),
    ('pods "x-1-0" is forbidden: no PriorityClass with name high was found', "kubectl get priorityclasses"),
    ('pod rejected: RuntimeClass "gvisor" not found', "runtimeclasses"),
)
NO_NODE = (
    ("3 node(s) didn't match Pod's node affinity/selector. no new claims", "--show-labels"),
    ("1 node(s) had untolerated taint(s), 2 node(s) had untolerated taint {gpu: yes}", "Add tolerations"),
    ("1 node(s) had untolerated taint {a: b}, 2 Insufficient nvidia.com/gpu", "Free or add nodes"),
    ("3 node(s) didn't have free ports for the requested pod ports (ports of the node: 9400)", "free ports"),
)
NO_IMAGE = (
    ('Container image "a:1" is not present with pull policy of Never', "imagePullPolicy: IfNotPresent"),
    ("failed to pull and unpack image: pull access denied, repository does not exist", "imagePullSecrets"),
    ("failed to do request: Head https://r.example/v2: dial tcp: lookup r.example: no such host", "reach the registry"),
    ('Failed to apply default image tag "A:b:c": invalid reference format', "its name is not valid"),
    ("failed to resolve reference: r.example/a:1: not found", "name and tag"),
)
NO_VOLUME = (
    (
        'FailedMount: MountVolume.SetUp failed for volume "cfg" : configmap references non-existent config key: a.yaml '
        "(volume cfg is ConfigMap c)",
        "Add the key a.yaml to that ConfigMap",
    ),
    ("FailedMount: references non-existent secret key: token (volume s is Secret t)", "Add the key token"),
    ("FailedMount: timed out (volume d is NFS server 10.0.0.9)", "Check NFS server 10.0.0.9"),
    (
        'unbound; claim p: ProvisioningFailed: storageclass.storage.k8s.io "nfs" not found',
        "Create the StorageClass nfs",
    ),
    ("unbound; claim p: FailedBinding: no persistent volumes available", "a storageClassName"),
    ("FailedAttachVolume: Multi-Attach error for volume (volume d is claim p)", "ReadWriteMany"),
)
NOT_STARTING = (
    ("CreateContainerConfigError: couldn't find key token in Secret d/s", "Add the key token"),
    ('CreateContainerConfigError: failed to prepare subPath for volumeMount "d"', "Correct subPath"),
    ('RunContainerError: exec: "shipp": executable file not found in $PATH: unknown', "Correct command"),
    ("CrashLoopBackOff: init container mesh: exit code 3: no config", "-c mesh --previous"),
    ("CreateContainerConfigError: missing value for HOME", "subPathExpr"),
)


@pytest.mark.parametrize(
    ("conditions", "changes", "what", "todo"),
    [
        ([], {"age": 2}, "x is new", ""),
        ([], {"age": 300}, "in the 5m00s since it was created", "app.kubernetes.io/name=ddp-operator"),
        ([], {"phase": "Frozen", "attempt": 2}, "a status that this version of ddp cannot read", "describe ddp x"),
        ([condition(c.ACCEPTED, "False", c.INVALID_SPEC, "nodes: too many"),
          condition(c.SCHEDULED, "False", c.WAITING_FOR_PODS)], {},
         "x is not accepted (InvalidSpec): nodes: too many.", "ddp render"),
        ([condition(c.ACCEPTED, "Unknown", c.SERVER_ERROR, "webhook")], {},
         "x is not accepted (ServerError): webhook.", "validatingwebhookconfigurations"),
        ([condition(c.ACCEPTED, "False", c.VERSION_MISMATCH)], {"phase": "Running"}, "", "helm rollback"),
        ([condition(c.SUSPENDED, "True", c.SUSPENDED_BY_SPEC)], {"phase": "Suspended"},
         "x has been suspended for 1m00s", "ddp resume x"),
        ([condition(c.SUSPENDED, "False", c.STOPPING, "2 pods"), condition(c.PROGRESSING, "True", c.TRAINING)],
         {"phase": "Running"}, "x is stopping: 2 pods.", ""),
        ([condition(c.RESTARTING, "True", c.GROUP_RESTART, "attempt 2 of 4")],
         {"phase": "Restarting", "lastFailure": FAILURE, "checkpoint": {"step": 40}},
         "(GroupRestart): attempt 2 of 4. The last failure was UserError (rank 3, pod x-2-1-abcde, node node-b, exit",
         "from the checkpoint of step 40"),
        ([condition(c.SCHEDULED, "False", c.UNSCHEDULABLE, "x-1-0: 0/3 nodes", age=312)], {"phase": "Pending"},
         "x has waited for 5m12s for its pods to be scheduled and started (Unschedulable): x-1-0: 0/3 nodes.",
         "ddp scale x N"),
        ([condition(c.SCHEDULED, "False", c.WAITING_FOR_PODS, age=900)],
         {"phase": "Pending", "attemptTime": format_time(NOW - timedelta(seconds=2))}, "has waited for 2s", ""),
        ([condition(c.SCHEDULED, "False", "NewReason", "something new")], {},
         "(NewReason): something new.", "kubectl describe ddp x has all conditions"),
        ([condition(c.SCHEDULED, "False", "QuotaPending")], {}, "(QuotaPending).", "when its queue admits it"),
        ([condition(c.SCHEDULED, "False", "WorkloadFinished")], {}, "", "ddp suspend x, then ddp resume x"),
        ([condition(c.SCHEDULED, "False", "Inadmissible", "insufficient quota for cpu, request > maximum capacity")],
         {}, "", "ddp scale x N"),
        ([condition(c.SCHEDULED, "False", "Inadmissible", "flavor a doesn't match node affinity")],
         {}, "", "tolerations"),
        ([condition(c.RENDEZVOUSED, "Unknown", c.NO_METRICS_PAGE)], {"phase": "Running"}, "", "NetworkPolicies"),
        ([condition(c.PROGRESSING, "False", other_reasons.STALLED, "rank 1 waits")],
         {"phase": "Running", "progress": {"step": 20, "lastStepTime": format_time(NOW - timedelta(minutes=10))}},
         "is running without a step for 10m00s after step 20", ""),
        ([condition("TrainsAsOne", "False", "NoProcessGroup", "no group spanned all")], {"phase": "Succeeded"},
         "no group spanned all", "then ddp delete x, and submit the file"),
        ([condition("Failed", "True", "DeadlineExceeded", "active for too long")],
         {"phase": "Failed", "attempt": 2, "lastFailure": FAILURE | {"conclusion": ""}},
         "(DeadlineExceeded): active for too long. The last failure was", ""),
        ([FAILED], {"phase": "Failed", "lastFailure": FAILURE, "code": {"revision": "abc"}},
         "Its code was abc.", "ddp delete x, and submit the file"),
        ([FAILED], {"phase": "Failed", "deleted": True}, "x is being deleted.", ""),
        ([], {"managedBy": "example.com/dispatcher"}, "managed by example.com/dispatcher (spec.managedBy)", ""),
    ],
)  # fmt: skip
def test_state_is_explained_with_its_remedy(
    conditions: list[dict[str, Any]], changes: dict[str, Any], what: str, todo: str
) -> None:
    status = dict(changes)
    spec = {name: status.pop(name) for name in ("managedBy", "code") if name in status}
    deleted = status.pop("deleted", False)
    resource = job(*conditions, age=status.pop("age", 600), **status)
    resource["spec"] = spec
    if deleted:
        resource["metadata"]["deletionTimestamp"] = format_time(NOW)
    explanation = explain_why(resource, (), NOW)
    assert (what in explanation.what, todo in explanation.todo) == (True, True), str(explanation)
    assert " -n " not in explanation.todo


@pytest.mark.parametrize(
    ("phase", "what", "todo"),
    [
        ("Running", "is running without a step", "in cluster east (MultiKueue): ddp logs x --context NAME reads them"),
        ("Succeeded", "It ran in cluster east (MultiKueue).", ""),
    ],
)
def test_job_of_multikueue_names_its_cluster(phase: str, what: str, todo: str) -> None:
    stalled = condition(c.PROGRESSING, "False", other_reasons.STALLED, "rank 1 waits")
    resource = job(stalled, phase=phase, progress={"step": 20})
    resource["spec"] = {"managedBy": other_kinds.MULTIKUEUE}
    resource["metadata"]["annotations"] = {other_kinds.ANNOTATION_CLUSTER: "east"}
    old = format_time(NOW - timedelta(hours=1))
    resource["metadata"]["managedFields"] = [{"manager": "ddp-operator", "subresource": "status", "time": old}]
    explanation = explain_why(resource, (), NOW)
    assert (what in explanation.what, todo in explanation.todo) == (True, True), str(explanation)


class TestWhatIsTold:
    def test_pending_change_is_reported_with_and_without_obstacle(self) -> None:
        scheduled = condition(c.SCHEDULED, "True", other_reasons.CHANGE_PENDING, "2/2 pods scheduled; size 3 waits")
        slow = condition(c.PROGRESSING, "False", c.NO_STEP_YET, "no step")
        for conditions in ((scheduled,), (scheduled, slow)):
            assert " 2/2 pods scheduled; size 3 waits." in why(*conditions, phase="Running").what

    @pytest.mark.parametrize(
        ("first", "second"),
        list(
            pairwise(
                [
                    condition(c.ACCEPTED, "False", c.INVALID_SPEC),
                    condition(c.SUSPENDED, "True", c.SUSPENDED_BY_SPEC),
                    condition(c.RESTARTING, "True", c.GROUP_RESTART),
                    condition(c.SCHEDULED, "False", c.WAITING_FOR_PODS),
                    condition(c.RENDEZVOUSED, "False", c.WAITING_FOR_RANKS),
                    condition(c.PROGRESSING, "False", other_reasons.STALLED),
                    condition(c.RENDEZVOUSED, "Unknown", c.NO_METRICS_PAGE),
                    condition(c.PROGRESSING, "Unknown", c.NO_STEP_YET),
                ]
            )
        ),
    )
    def test_more_important_condition_is_explained(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        assert why(second, first, phase="Running").reason == first["reason"]
        assert [why(item, phase="Running").reason for item in (first, second)] == [first["reason"], second["reason"]]

    def test_blocked_restart_has_remedy_of_blocker(self) -> None:
        words = "x-2-0-abcde: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu"
        explanation = why(
            condition(c.RESTARTING, "True", c.DISRUPTED, "attempt 2, not counted"),
            condition(c.SCHEDULED, "False", c.UNSCHEDULABLE, words),
            phase="Restarting",
        )
        assert explanation.what.endswith(f"attempt 2, not counted. Its pods wait (Unschedulable): {words}.")
        assert (explanation.reason, explanation.todo) == (c.UNSCHEDULABLE, REMEDIES[c.UNSCHEDULABLE].format(name="x"))

    @pytest.mark.parametrize(
        ("reason", "message", "todo"),
        [
            (c.VOLUME_NOT_READY, 'x-1-0-a: FailedMount: MountVolume.SetUp failed: secret "s" not found', "Create it"),
            (c.PODS_NOT_STARTING, 'x-1-0-a: CreateContainerConfigError: configmap "c" not found', "Create it"),
            (c.VOLUME_NOT_READY, 'configmap "x-launcher-0123456789" not found', "ddp suspend x, then ddp resume x"),
            (c.VOLUME_NOT_READY, '0/2 nodes are available: persistentvolumeclaim "p" not found', "kubectl get pvc"),
            (
                c.PODS_FORBIDDEN,
                'pods "x-1-*" is forbidden: violates PodSecurity "restricted"',
                "securityProfile: Restricted",
            ),
            (
                c.PODS_NOT_STARTING,
                'x-1-0-a: CreateContainerError: failed to generate container "b5" spec: failed to generate spec: '
                'failed to mkdir "": mkdir : no such file or directory',
                "--code-claim",
            ),
            (c.PODS_NOT_STARTING, "container has runAsNonRoot and image will run as root (pod: …)", "runAsUser"),
            *((c.PODS_FORBIDDEN, f"Error creating: {message}", todo) for message, todo in FORBIDDEN),
            *((c.UNSCHEDULABLE, f"x-1-0-a: 0/3 nodes are available: {message}", todo) for message, todo in NO_NODE),
            *((c.IMAGE_PULL, f"x-1-0-a: {message}", todo) for message, todo in NO_IMAGE),
            *((c.VOLUME_NOT_READY, f"x-1-0-a: {message}", todo) for message, todo in NO_VOLUME),
            *((c.PODS_NOT_STARTING, f"x-1-0-a: {message}", todo) for message, todo in NOT_STARTING),
            (
                c.INIT_CONTAINER_RUNNING,
                "waiting for pods 0, 1; pod x-1-0-a (and 1 more pod) runs init container wait-db since T",
                "kubectl logs x-1-0-a -c wait-db.",
            ),
        ],
    )
    def test_known_message_has_its_own_remedy(self, reason: str, message: str, todo: str) -> None:
        assert todo in why(condition(c.SCHEDULED, "False", reason, message), phase="Pending").todo

    def test_name_of_job_is_not_taken_for_message(self) -> None:
        words = "no-such-host-1-0-abcde (and 1 more pod): manifest unknown"
        explanation = why(
            condition(c.SCHEDULED, "False", c.IMAGE_PULL, words), phase="Pending", jobName="no-such-host-1"
        )
        assert "name and tag" in explanation.todo

    @pytest.mark.parametrize("reason", ["Failed", "BackOff"])
    def test_event_that_repeats_status_of_pod_is_no_last_warning(self, reason: str) -> None:
        pulling = condition(c.SCHEDULED, "False", c.IMAGE_PULL, "x-1-0: manifest unknown")
        events = (event("no pull secret", reason="FailedToRetrieveImagePullSecret"), event("Error: x", reason=reason))
        assert "The last warning was FailedToRetrieveImagePullSecret" in why(pulling, events=events).what

    def test_warning_about_another_try_is_not_repeated(self) -> None:
        statement = 'Error creating: pods "x-1-*" is forbidden: no'
        refused = condition(c.SCHEDULED, "False", c.PODS_FORBIDDEN, statement)
        assert (
            "last warning" not in why(refused, events=(event(statement.replace("*", "0-2n9g4")),), phase="Pending").what
        )

    def test_training_job_has_no_obstacle(self) -> None:
        good = [
            condition(c.ACCEPTED, "True", c.VALID),
            condition(c.SUSPENDED, "False", c.NOT_SUSPENDED),
            condition(c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED),
            condition(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED),
            condition(c.PROGRESSING, "True", c.TRAINING),
        ]
        progress = {"step": 42, "totalSteps": 100, "percent": "42.0%", "eta": "5m12s"}
        progress["lastStepTime"] = format_time(NOW - timedelta(seconds=40))
        explanation = why(*good, phase="Running", progress=progress)
        assert str(explanation) == "x is training (step 42 of 100, 42.0% done, 5m12s left); nothing blocks it."
        progress["lastStepTime"] = format_time(NOW - timedelta(seconds=80))
        explanation = why(*good, phase="Running", progress=progress)
        assert str(explanation).endswith("left); its last step ended 1m20s ago.")

    @pytest.mark.parametrize(
        "obstacle",
        [
            condition("Restarting", "True", "PodReplacement", "pod 1 is replaced"),
            condition(c.RENDEZVOUSED, "False", c.WAITING_FOR_RANKS, "1/2 pods joined"),
            condition(c.PROGRESSING, "False", "WaitingForPeers", "pod 1 has lost its peers"),
        ],
    )
    def test_job_without_steps_since_its_last_one_has_its_age(self, obstacle: dict[str, Any]) -> None:
        progress = {"step": 42, "lastStepTime": format_time(NOW - timedelta(seconds=80))}
        what = why(obstacle, phase="Running", progress=progress).what
        assert "Its last step ended 1m20s ago." in what
        assert "last step" not in why(obstacle, phase="Running").what

    def test_failure_that_the_restart_states_is_not_repeated(self) -> None:
        message = "lost pod replaced, not counted: NodeLost (pod x-1-1): the pod was lost"
        failure = {"attempt": 1, "category": "NodeLost", "pod": "x-1-1", "message": "the pod was lost"}
        restarting = condition("Restarting", "True", "PodReplacement", message)
        text = str(why(restarting, phase="Restarting", lastFailure=failure | {"remedy": "check the node"}))
        assert text.count("the pod was lost") == 1
        assert "Check the node." in text
        other = failure | {"message": "a GPU failed"}
        assert "The last failure was NodeLost" in str(why(restarting, phase="Restarting", lastFailure=other))

    def test_nodes_that_the_operator_avoids_are_no_mistake_of_the_job(self) -> None:
        message = (
            "x-1-0: 0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector; the operator avoids "
            "node-b (status.failedNodes)"
        )
        todo = why(condition(c.SCHEDULED, "False", c.UNSCHEDULABLE, message), phase="Pending").todo
        assert "it uses them again" in todo
        assert "Correct nodeSelector" not in todo

    def test_failed_preflight_is_reported(self) -> None:
        flight = {
            "failed": ["transport", "pairs"],
            "transport": "Socket",
            "slowest": "pods 0 and 7 (nodes a and h): 1200 MB/s",
        }
        good = condition(c.PROGRESSING, "True", c.TRAINING)
        explanation = explain_why(job(good, phase="Running", preflight=flight), (), NOW, option=" -n team")
        assert str(explanation) == (
            "x is running. Its preflight failed in transport, pairs: traffic between pods "
            "uses Socket, the slowest pair is pods 0 and 7 (nodes a and h): 1200 MB/s. The reasons are in pod 0's log: "
            "ddp logs x -n team --node 0."
        )
        slow = {"failed": ["allreduce"], "allReduceMegabytesPerSecond": "30"}
        assert "an all-reduce transfers 30 MB/s" in str(why(good, phase="Running", preflight=slow))

    def test_explanation_of_invisible_steps_has_one_remedy(self) -> None:
        hint = "no step is visible: metrics.autoInstrument is false. To show progress, set spec.metrics.logPatterns"
        explanation = why(condition(c.PROGRESSING, "Unknown", c.NO_STEP_YET, hint), phase="Running")
        assert str(explanation).endswith(f"(NoStepYet): {hint}.")

    def test_success_has_its_measurements(self) -> None:
        explanation = why(
            condition("Succeeded", "True", "AllNodesSucceeded"),
            phase="Succeeded",
            startTime="2026-11-20T10:00:00Z",
            completionTime="2026-11-20T11:30:00Z",
            progress={"step": 100, "loss": "0.1", "valAccuracy": "0.95"},
            restarts={"all": 3, "inPlace": 2, "used": 1, "limit": 3},
        )
        assert str(explanation) == "x has succeeded in 1h30m: step 100, loss 0.1, validation accuracy 0.95, 3 restarts."

    def test_every_doubt_about_a_success_has_a_remedy(self) -> None:
        for reason in doubts.DOUBTS:
            statement = why(condition(c.TRAINING_COMPLETE, "False", reason, "rank 1 ended"), phase="Succeeded")
            assert "But rank 1 ended." in statement.what
            assert (statement.reason, bool(statement.todo)) == (reason, True)

    def test_training_job_names_survived_failure(self) -> None:
        explanation = why(
            condition(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED),
            condition(c.PROGRESSING, "True", c.TRAINING),
            phase="Running",
            restarts={"all": 2, "inPlace": 2, "used": 0, "limit": 3},
            lastFailure=FAILURE,
        )
        (note,) = explanation.notes
        assert "It was restarted 2 times; the last failure was UserError (rank 3" in note.what
        assert note.todo.startswith(FAILURE["remedy"][:1].upper())

    def test_each_problem_of_training_has_its_own_remedy_and_present_ones_are_first(self) -> None:
        explanation = why(
            condition(c.PROGRESSING, "True", c.TRAINING),
            phase="Running",
            restarts={"all": 1, "inPlace": 1, "used": 0, "limit": 3},
            lastFailure=FAILURE,
            stragglers=[{"rank": 1, "ratio": "1.7", "cause": "data"}],
        )
        slow, restarted = explanation.notes
        assert slow.is_about_ranks
        assert ("its DataLoader workers" in slow.todo, "Check the path" in restarted.todo) == (True, True)
        assert str(explanation).index(slow.todo) < str(explanation).index(restarted.what)


class TestExplainedFailure:
    def test_root_cause_has_rank_pod_and_hint(self) -> None:
        explanation = why(FAILED, phase="Failed", attempt=4, lastFailure=FAILURE)
        assert explanation.what == (
            "x has failed after 4 attempts: UserError (rank 3, pod x-2-1-abcde, node node-b, exit code 1): "
            "FileNotFoundError: no such file: 'train.csv'. It was given up (RestartBudgetExhausted): failed 4 times, "
            "recovery.maxRestarts is 3."
        )
        assert explanation.todo.startswith("Check the path of the data. ")
        assert "maxRestarts" in explanation.todo

    def test_sole_cause_is_stated_once(self) -> None:
        failed = condition("Failed", "True", "UserError", f"UserError (rank 3): {FAILURE['message']}")
        explanation = why(failed, phase="Failed", attempt=1, lastFailure=FAILURE | {"conclusion": ""})
        assert explanation.what.startswith("x has failed: UserError (rank 3, ")
        assert explanation.what.count("UserError") == 1

    def test_logs_are_next_step_only_without_hint(self) -> None:
        odd = condition("Failed", "True", "Odd", "the Job failed")
        assert why(odd, phase="Failed", lastFailure=FAILURE).todo == "Check the path of the data."
        without = why(odd, phase="Failed", lastFailure=FAILURE | {"remedy": ""})
        assert without.todo == "Read the end of its log: ddp logs x."

    def test_braces_in_hint_are_kept(self) -> None:
        failure = FAILURE | {"remedy": "use {name} or {0}", "message": "KeyError: '{'"}
        explanation = why(FAILED, phase="Failed", lastFailure=failure)
        assert "Use {name} or {0}." in explanation.todo


class TestWarningEvents:
    WAITING = condition(c.SCHEDULED, "False", c.WAITING_FOR_PODS, "1/2 pods scheduled")

    def test_newest_warning_is_added(self) -> None:
        explanation = why(self.WAITING, events=(event("old"), event("exceeded quota", reason="FailedCreate")))
        assert explanation.what.endswith("The last warning was FailedCreate: exceeded quota.")

    def test_warning_in_condition_is_not_repeated(self) -> None:
        words = "0/3 nodes are available"
        explanation = why(condition(c.SCHEDULED, "False", c.UNSCHEDULABLE, f"x-1-0: {words}"), events=(event(words),))
        assert explanation.what.count(words) == 1

    @pytest.mark.parametrize(
        ("age", "is_told"),
        [(10, True), (70, True), (200, False), (700, False)],
        ids=["now", "just before the wait", "of an earlier fault", "of a deleted job of this name"],
    )
    def test_warning_from_before_the_wait_is_not_added(self, age: int, is_told: bool) -> None:
        warning = event("node(s) had taints") | {"lastTimestamp": format_time(NOW - timedelta(seconds=age))}
        assert ("last warning" in why(self.WAITING, events=(warning,)).what) == is_told

    @pytest.mark.parametrize(
        ("reason", "scheduled", "rendezvoused", "is_told"),
        [
            ("FailedMount", "True", c.ALL_RANKS_JOINED, False),
            ("FailedScheduling", "True", c.WAITING_FOR_WORKERS, False),
            ("FailedScheduling", "True", c.WAITING_FOR_RANKS, False),
            ("FailedMount", "True", c.INIT_CONTAINER_RUNNING, False),
            ("FailedMount", "True", c.WAITING_FOR_RANKS, True),
            ("FailedMount", "False", c.ENOUGH_RANKS_JOINED, True),
            ("FailureUnknown", "True", c.ALL_RANKS_JOINED, True),
        ],
    )
    def test_warning_about_start_of_pods_is_told_until_they_start(
        self, reason: str, scheduled: str, rendezvoused: str, is_told: bool
    ) -> None:
        conditions = (
            condition(c.SCHEDULED, scheduled, c.ALL_PODS_SCHEDULED, age=30),
            condition(c.RENDEZVOUSED, "True" if "Joined" in rendezvoused else "False", rendezvoused, age=30),
            condition(c.PROGRESSING, "False", c.NO_STEP_YET, age=30),
        )
        warning = event("no such volume", reason=reason) | {"lastTimestamp": format_time(NOW)}
        assert ("last warning" in why(*conditions, phase="Running", events=(warning,)).what) == is_told

    def test_a_long_warning_is_cut(self) -> None:
        assert len(why(self.WAITING, events=(event("word " * 1000),)).what) < 600


def status_written(age: int, manager: str = "ddp-operator") -> list[dict[str, Any]]:
    """Return metadata.managedFields of a status that was written some seconds ago."""
    time = format_time(NOW - timedelta(seconds=age))
    return [{"manager": manager, "subresource": "status", "time": time}]


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
@pytest.mark.parametrize(
    ("cause", "part"),
    [("data", "waits for data"), ("compute", "its computation"), ("throttled", "used up its limit of CPUs")],
)
def test_slow_rank_is_named_while_the_job_trains_and_afterwards(phase: str, cause: str, part: str) -> None:
    slow = [{"rank": 1, "ratio": "23.4", "cause": cause}, {"rank": 5, "ratio": "1.4", "cause": "data"}]
    trains = condition(c.PROGRESSING, "True", c.TRAINING)
    text = str(why(trains, phase=phase, stragglers=slow, progress={"step": 7}))
    assert "Rank 1 works 23.4 times as long as its peers in each step (also slow: rank 5): " in text
    assert part in text
    assert "Rank" not in str(why(trains, phase=phase, progress={"step": 7}))


def test_each_cause_of_a_slow_rank_has_a_remedy() -> None:
    for cause in get_args(StragglerCause):
        text = describe_stragglers(Status(stragglers=(Straggler(rank=1, ratio="2.0", cause=cause),)))
        assert re.fullmatch(r"Rank 1 works 2\.0 times as long as its peers in each step: [^.]+\. [A-Z].+\.", text)


def test_restarted_sidecar_of_training_job_names_command_for_its_log() -> None:
    message = "2/2 pods scheduled; sidecar mesh of pod x-1-1-abcde: 7 restarts (last reason: OOMKilled)"
    scheduled = condition(c.SCHEDULED, "True", other_reasons.SIDECAR_RESTARTED, message)
    explanation = explain_why(job(scheduled, phase="Running"), (), NOW, option=" -n team")
    assert "sidecar mesh of pod x-1-1-abcde: 7 restarts" in explanation.what
    assert explanation.todo == "Why the sidecar ended: kubectl logs x-1-1-abcde -c mesh --previous -n team."


def test_sidecar_restarted_for_its_probe_names_probe() -> None:
    message = "2/2 pods scheduled; sidecar mesh of pod x-1-1-abcde: 7 restarts (last reason: Error)"
    pod = {"kind": "Pod", "name": "x-1-1-abcde", "fieldPath": "spec.initContainers{mesh}"}
    events = (
        event("Liveness probe failed: connection refused", reason="Unhealthy") | {"involvedObject": pod},
        event("Container mesh failed liveness probe, will be restarted", "Normal", "Killing") | {"involvedObject": pod},
    )
    explanation = why(
        condition(c.SCHEDULED, "True", other_reasons.SIDECAR_RESTARTED, message), events=events, phase="Running"
    )
    assert "Its livenessProbe fails: connection refused. Correct or remove livenessProbe" in explanation.todo


class TestAbsentOperator:
    TRAINING = (condition(c.PROGRESSING, "True", c.TRAINING),)

    def explain(self, *conditions: dict[str, Any], written: int = 10, renewed: int | None = None, **status: Any) -> Why:
        resource = job(*conditions, **{"phase": "Running", "progress": {"step": 42}, **status})
        resource["metadata"]["managedFields"] = status_written(written) + status_written(5, "kubectl")
        lease = None
        if renewed is not None:
            lease = LeaseRenewal(NOW - timedelta(seconds=renewed), timedelta(seconds=15))
        return explain_why(resource, (), NOW, lease=lease)

    def test_old_status_of_training_job_is_not_its_state(self) -> None:
        explanation = self.explain(*self.TRAINING, written=400)
        assert explanation.reason == "NoOperator"
        assert explanation.what == (
            "No operator has written the status for 6m40s, although the job trains; failures, suspension and resizing "
            "are not handled. The last known state: x is training (step 42); nothing blocks it."
        )
        assert "app.kubernetes.io/name=ddp-operator" in explanation.todo

    def test_old_lease_is_reported_for_waiting_job(self) -> None:
        waiting = condition(c.SCHEDULED, "False", c.UNSCHEDULABLE, "0/3 nodes")
        explanation = self.explain(waiting, renewed=31, phase="Pending")
        assert explanation.what.startswith("No operator has renewed its Lease for 31s; failures, ")
        assert "0/3 nodes" in explanation.what

    @pytest.mark.parametrize(
        ("changes", "why_not"),
        [
            ({"written": 400, "renewed": 5}, "the Lease is renewed"),
            ({"written": 400, "renewed": 29}, "a standby takes over"),
            ({"written": 200}, "a step may take so long"),
            ({"written": 400, "progress": None}, "a script without steps changes no status"),
            ({"written": 400, "phase": "Succeeded", "renewed": 900}, "the job has ended"),
        ],
    )
    def test_operator_is_not_missed_without_evidence(self, changes: dict[str, Any], why_not: str) -> None:
        assert self.explain(*self.TRAINING, **changes).reason != "NoOperator", why_not


class TestRemedies:
    @pytest.mark.parametrize("reason", sorted(REMEDIES))
    def test_every_remedy_accepts_name_and_is_sentence(self, reason: str) -> None:
        text = REMEDIES[reason].format(name="digits", onward="from step 3", option="")
        assert "{" not in text
        assert text[0].isupper() or text.startswith("kubectl")
        assert text.endswith((".", "N."))


class TestNamespace:
    @pytest.mark.parametrize("reason", REMEDIES)
    def test_namespaced_commands_get_option(self, reason: str) -> None:
        waits = condition("Scheduled", "False", reason, "waits")
        todo = explain_why(job(waits), (), NOW, option=" -n team").todo
        for command in re.findall(r"(?:ddp|kubectl) [a-z]+ (?:[^.;:()]|\.(?! |$))*", todo):
            if not re.match(r"ddp (render|list)|kubectl (describe node|get validating)", command):
                assert " -n team" in command, todo


def test_job_whose_pods_start_and_fail_again_waits_since_it_last_ran() -> None:
    conditions = (
        condition("Scheduled", "False", c.PODS_NOT_STARTING, "x-1-0-a: CrashLoopBackOff", age=8),
        condition("Rendezvoused", "False", c.WAITING_FOR_RANKS, "waits", age=240),
    )
    assert "has waited for 4m00s for its pods" in why(*conditions, phase="Pending").what


@pytest.mark.parametrize(
    ("remedy", "local"),
    [
        (OOM.remedy, "lower the batch size"),
        ("/dev/shm is full: raise spec.sharedMemory and the container memory limit, or use fewer DataLoader workers",
         "/dev/shm is full: use fewer DataLoader workers"),
        ("the quota is used up: enlarge the claim, or raise the limits of emptyDir",
         "the quota is used up: enlarge the claim, or raise the limits of emptyDir"),
        (REMEDIES["RepeatedFailure"], "Another attempt would fail in the same way: fix the cause."),
        ("Fix it: write A, and write B; then submit the job again.", "Fix it: write A, and write B."),
        ("Read it. Check the claim: kubectl get pvc.", "Read it. Check the claim: kubectl get pvc."),
        ("", ""),
    ],
)  # fmt: skip
def test_clauses_for_clusters_are_omitted(remedy: str, local: str) -> None:
    assert omit_cluster_advice(remedy) == local


@pytest.mark.parametrize(
    ("dev", "facts", "absent"),
    [
        (
            {"run": 3, "result": "Failed"},
            ["Run 3 failed: UserError", "train.csv", "Check the path of the data."],
            "lost",
        ),
        ({"run": 3, "result": "Succeeded"}, ["Run 3 succeeded"], "train.csv"),
        ({"run": 3, "result": "Stopped"}, ["Run 3 was stopped"], "train.csv"),
        ({"lastRun": 4}, ["the code of run 4 was lost", "have no code", "the last failure: UserError"], "succeeded"),
    ],
)
def test_held_job_is_explained_by_its_run(dev: dict[str, Any], facts: list[str], absent: str) -> None:
    held = condition("Progressing", "False", "Held", "the condition's own text")
    answer = why(held, phase="Held", dev=dev | HELD_UNTIL, lastFailure=FAILURE)
    for fact in (*facts, "held for 29m", "ddp rerun x", "ddp release x"):
        assert fact in str(answer)
    assert absent not in str(answer)
