"""Scheduled: why pods do not exist or do not start, with the message of the component that knows."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status
from ddp_operator.decide.attempt import observe_attempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.scheduling import describe_scheduling
from ddp_operator.decide.state import Causes, Observation, Problem, State
from ddp_operator.features.waiting.pods import explain_scheduling, list_restarted_sidecars
from ddp_operator.features.waiting.polling import compute_event_poll_delay, list_objects_to_inspect
from ddp_operator.kube.children import trim_object
from tests.support.builders import NOW, child_job, child_pod, job, observe, template, trainer

STATUS = Status(attempt=1, attempt_time=NOW).remember(nodes=2)
FORBIDDEN = 'Error creating: pods "train-1-0-x7k2p" is forbidden: exceeded quota: team, requested: pods=1'
QUEUED = child_job(suspend=True, queue="gpu", written=False)
BOUND = {"conditions": [{"type": "PodScheduled", "status": "True"}]}


def see(*pods: Any, jobs: Any = None, problems: Any = None, **spec: Any) -> tuple[Any, Observation]:
    typed = job(status=STATUS, nodes=2, **spec)
    return typed, observe(typed, jobs or [child_job()], pods, observed={"waiting": Causes(problems or {})})


def explain(typed: DDPTrainingJob, seen: Observation) -> Fact:
    attempt = observe_attempt(State(typed, seen, NOW), typed.status, None)
    return explain_scheduling(attempt, describe_scheduling(typed, seen, 1, 2, NOW))


def say(*pods: Any, **kwargs: Any) -> tuple[str, str]:
    typed, observation = see(*pods, **kwargs)
    fact = explain(typed, observation)
    assert fact.status == "False"
    return fact.reason, fact.message


def bound(index: int = 0, age: float = 60) -> dict[str, Any]:
    return child_pod(index, "Pending", node="node-a", age=age, status=BOUND)


class TestMessages:
    @pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
    def test_image_that_cannot_be_pulled(self, reason: str) -> None:
        waiting = {"name": "trainer", "state": {"waiting": {"reason": reason, "message": "no such image"}}}
        pod = child_pod(0, "Pending", node="n", status={"containerStatuses": [waiting]})
        assert say(pod) == ("ImagePull", "train-1-0-abcde: no such image")

    def test_other_reasons_keep_their_name(self) -> None:
        waiting = {"name": "a", "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}}}
        pod = child_pod(0, "Pending", status={"initContainerStatuses": [waiting]})
        assert say(pod) == (
            "PodsNotStarting",
            "train-1-0-abcde: CreateContainerConfigError: init container a: no secret",
        )

    def test_message_names_the_nodes_that_the_operator_avoids(self) -> None:
        rule = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["b"]}]}
        terms = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [rule]}}
        words = "0/2 nodes: 1 node(s) didn't match Pod's node affinity/selector, 1 Insufficient cpu."
        waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
        status = {"conditions": [waiting]}
        avoiding = child_pod(0, "Pending", spec={"affinity": {"nodeAffinity": terms}}, status=status)
        assert say(avoiding)[1].endswith("1 Insufficient cpu; the operator avoids b (status.failedNodes)")
        assert say(child_pod(0, "Pending", status=status))[1].endswith("1 Insufficient cpu.")

    def test_forbidden_pods_are_reported_without_name_of_each_try(self) -> None:
        text = say(child_pod(0), problems={"job-1": Problem("FailedCreate", FORBIDDEN)})
        words = 'Error creating: pods "train-1-*" is forbidden: exceeded quota: team, requested: pods=1'
        assert text == ("PodsForbidden", f"{words} (1/2 pods scheduled)")

    def test_restarted_sidecar_is_mentioned_without_blocking(self) -> None:
        """Its state changes with every try, and each change would be an Event of the job."""
        side = {"name": "mesh", "restartCount": 7, "lastState": {"terminated": {"reason": "OOMKilled"}}}
        side["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
        running = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        spec = {"initContainers": [{"name": "mesh", "restartPolicy": "Always"}]}
        pods = child_pod(0), child_pod(1, spec=spec, status={"initContainerStatuses": [side], **running})
        typed, seen = see(*pods)
        fact = explain(typed, seen)
        assert (fact.status, fact.reason) == ("True", "SidecarRestarted")
        assert fact.message == (
            "2/2 pods scheduled; sidecar mesh of pod train-1-1-abcde: 7 restarts (last reason: OOMKilled)"
        )
        waits = child_pod(1, "Pending", node="node-a", spec=spec, status={"initContainerStatuses": [side]})
        assert say(child_pod(0), waits) == (
            "PodsNotStarting",
            "train-1-1-abcde: CrashLoopBackOff: init container mesh: exit code 0: the container was killed because it "
            "used more memory than its limit",
        )

    @pytest.mark.parametrize(
        ("pod", "ports"),
        [
            (
                {"hostNetwork": True},
                "29400 of spec.rendezvous.port, 9400 of spec.metrics.port, 8080 of container trainer",
            ),
            ({}, "80 of container trainer"),
        ],
    )
    def test_taken_ports_of_node_are_named_with_their_fields(self, pod: Any, ports: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        condition["message"] = "2 node(s) didn't have free ports for the requested pod ports"
        waits = child_pod(1, "Pending", status={"conditions": [condition]})
        container = trainer(ports=[{"containerPort": 8080, "hostPort": 80}])
        reason, message = say(child_pod(0), waits, template=template(container, **pod))
        assert (reason, message.partition("ports (")[2]) == ("Unschedulable", f"ports of the node: {ports})")

    @pytest.mark.parametrize("phase", ["Pending", "Running"])
    def test_warning_of_kubelet_is_dropped_once_init_container_runs(self, phase: str) -> None:
        running = {"initContainerStatuses": [{"name": "wait-db", "state": {"running": {}}}]}
        problems = {"uid-train-1-1-abcde": Problem("FailedMount", "no volume")}
        typed, seen = see(child_pod(0), child_pod(1, phase, node="node-a", status=running), problems=problems)
        assert explain(typed, seen).status == "True"

    def test_job_waiting_for_admission_names_its_queue(self) -> None:
        text = say(jobs=[QUEUED])
        assert text == ("QuotaPending", "Job train-1 is waiting for admission by queue gpu")
        unlabelled = child_job(suspend=True, written=False)
        waits = "Job train-1 was suspended by another client and waits to be resumed"
        assert say(jobs=[unlabelled]) == ("QuotaPending", waits)
        expected = {"job-1": Problem("Inadmissible", "words")}
        waits = "Job train-1 is waiting for admission by Kueue: words"
        assert say(jobs=[unlabelled], problems=expected) == ("Inadmissible", waits)

    def test_kueue_message_is_quoted_until_admission(self) -> None:
        words = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor a, 2 more needed"
        expected = {"job-1": Problem("QuotaPending", words)}
        text = say(jobs=[QUEUED], problems=expected)
        waits = "Job train-1 is waiting for admission by queue gpu"
        assert text == ("QuotaPending", f"{waits}: {words}")
        # Once it is admitted the queue's message is outdated.
        assert say(jobs=[child_job(queue="gpu")], problems=expected) == ("WaitingForPods", "0/2 pods scheduled")

    def test_gated_pod_of_elastic_job_waits_for_quota(self) -> None:
        def grown(*gates: str) -> Any:
            waiting = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
            spec = {"schedulingGates": [{"name": gate} for gate in gates]}
            return child_pod(1, "Pending", spec=spec, status={"conditions": [waiting]}, age=7)

        waits = "train-1-1-abcde: waiting for quota; its peers continue"
        assert say(child_pod(0), grown("kueue.x-k8s.io/elastic-job")) == ("QuotaPending", waits)
        expected = {"job-1": Problem("Inadmissible", "LocalQueue gpu is held")}
        held = say(child_pod(0), grown("kueue.x-k8s.io/elastic-job"), problems=expected)
        assert held == ("Inadmissible", f"{waits}: LocalQueue gpu is held")
        assert say(child_pod(0), grown("other")) == ("PodsNotStarting", "train-1-1-abcde: SchedulingGated: gated")
        # The last gate was removed, and the scheduler has not written since.
        assert say(child_pod(0), grown())[0] == "WaitingForPods"
        seen = see(child_pod(0, age=900), grown("kueue.x-k8s.io/elastic-job"))
        assert list_objects_to_inspect(*seen, NOW) == ("job-1",)
        assert compute_event_poll_delay(*seen, NOW, 1) == 10, "it counts from the pod, not from the attempt"

    def test_partly_admitted_job_states_its_pods(self) -> None:
        few = child_job(nodes=1, queue="gpu", written=False, suspend=False)
        assert say(child_pod(0), jobs=[few]) == ("QuotaPending", "queue admitted 1/2 pods; training with 1")
        assert list_objects_to_inspect(*see(child_pod(0), jobs=[few]), NOW + timedelta(hours=1)) == (), (
            "none is missing"
        )
        few["spec"]["template"] = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/elastic-job"}]}}
        assert say(child_pod(0), jobs=[few]) == ("WaitingForPods", "1/2 pods scheduled"), "it is about to grow"

    @pytest.mark.parametrize(
        ("queue", "nodes", "waits"),
        [
            ("gpu", 2, ""),
            ("other", 2, "queue other waits"),
            ("gpu", 3, "size 3 waits"),
            ("other", 3, "queue other and size 3 wait"),
        ],
    )
    def test_edit_that_needs_resumption_is_change_pending(self, queue: str, nodes: int, waits: str) -> None:
        labels = {"kueue.x-k8s.io/queue-name": queue}
        typed = job(status=STATUS, nodes=nodes, labels=labels)
        seen = observe(typed, [child_job(queue="gpu")], [child_pod(0), child_pod(1)])
        fact = explain(typed, seen)
        todo = "to apply: ddp suspend train, then ddp resume train"
        words = f"; {waits}, because the queue would stop running pods; {todo}" if waits else ""
        assert fact.reason == ("ChangePending" if waits else "AllPodsScheduled")
        assert (fact.status, fact.message) == ("True", f"2/2 pods scheduled{words}")

    def test_pull_error_is_equal_for_tries_and_pauses(self) -> None:
        cause = "failed to pull and unpack image: not found"

        def pod(reason: str, message: str) -> Any:
            waiting = {"name": "trainer", "state": {"waiting": {"reason": reason, "message": message}}}
            return child_pod(0, "Pending", status={"containerStatuses": [waiting]})

        first = say(pod("ErrImagePull", cause))
        assert first == ("ImagePull", f"train-1-0-abcde: {cause}")
        assert say(pod("ImagePullBackOff", f'Back-off pulling image "x:1": ErrImagePull: {cause}')) == first

    def test_user_suspension_is_not_queueing(self) -> None:
        assert say(jobs=[QUEUED], suspend=True)[0] == "WaitingForPods"
        assert say(jobs=[child_job(suspend=True)])[0] == "WaitingForPods"

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            ('0/3 nodes are available: persistentvolumeclaim "ckpt" not found.', "VolumeNotReady"),
            ("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "VolumeNotReady"),
            ("0/3 nodes are available: 3 node(s) had volume node affinity conflict.", "VolumeNotReady"),
            ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "Unschedulable"),
        ],
    )
    def test_scheduler_message_about_volume_is_volume_not_ready(self, message: str, reason: str) -> None:
        waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        pod = child_pod(0, "Pending", status={"conditions": [waiting]})
        assert say(pod) == (reason, f"train-1-0-abcde: {message}")

    def test_gang_quotes_unschedulable_pod(self) -> None:
        waits = "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled, one or more plugins"

        def pod(index: int, message: str) -> Any:
            waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            return child_pod(index, "Pending", status={"conditions": [waiting]})

        text = say(pod(0, waits), pod(1, "0/2 nodes are available: 2 Insufficient cpu."))
        words = "train-1-1-abcde (and 1 more pod): 0/2 nodes are available: 2 Insufficient cpu."
        assert text == ("Unschedulable", words)

    def test_other_warning_of_kubelet(self) -> None:
        text = say(bound(0), bound(1), problems={"uid-train-1-0-abcde": Problem("FailedCreatePodSandBox", "no CNI")})
        assert text == ("PodsNotStarting", "train-1-0-abcde: FailedCreatePodSandBox: no CNI")

    @pytest.mark.parametrize("age", [29, 30])
    def test_silent_job_controller_is_named(self, age: float) -> None:
        made = child_job()
        made["metadata"]["creationTimestamp"] = format_time(NOW - timedelta(seconds=age))
        made["status"] = {}
        absent = "the Job controller has not acted on Job train-1; check that kube-controller-manager is running"
        placed = "0/2 pods scheduled"
        assert say(jobs=[made]) == ("WaitingForPods", f"{absent} ({placed})" if age >= 30 else placed)
        made["status"] = {"startTime": format_time(NOW)}
        assert say(jobs=[made]) == ("WaitingForPods", "0/2 pods scheduled")

    @pytest.mark.parametrize("age", [None, 29, 30])
    def test_orphans_without_deletion_are_reported(self, age: float | None) -> None:
        """At any age of the attempt: a suspension may just have deleted its Job."""
        typed, seen = see(child_pod(owner="gone"))
        old = msgspec.structs.replace(typed.status, attempt_time=NOW - timedelta(hours=1))
        since = None if age is None else NOW - timedelta(seconds=age)
        fact = explain(replace(typed, status=old), replace(seen, orphaned_since=since))
        words = "waiting for 1 pods of the previous attempt to terminate"
        expected = "; their Job does not exist and no controller deletes them: check that "
        expected += "kube-controller-manager is running"
        assert (fact.reason, fact.message) == ("WaitingForFormerPods", words + expected * (age == 30))

    def test_terminating_pods_of_suspended_job_name_no_attempt(self) -> None:
        text = say(child_pod(owner="gone"), jobs=[], suspend=True)
        assert text == ("WaitingForFormerPods", "waiting for 1 pods to terminate")

    @pytest.mark.parametrize("age", [29, 30])
    def test_silent_scheduler_is_named(self, age: float) -> None:
        """No scheduler may have the name in spec.template.spec.schedulerName."""
        pods = [child_pod(n, "Pending", age=age, spec={"schedulerName": "volcanoo"}) for n in (0, 1)]
        words = "train-1-0-abcde (and 1 more pod): no scheduler has acted on it; check that volcanoo is running"
        ignored = ("Unschedulable", f"{words} (0/2 pods scheduled)")
        assert say(*pods) == (ignored if age >= 30 else ("WaitingForPods", "0/2 pods scheduled"))
        assert compute_event_poll_delay(*see(*pods), NOW, 1) is not None  # nothing else would cause a pass

    def test_scheduler_that_has_found_node_meanwhile_is_not_quoted(self) -> None:
        """Pulling a big image takes minutes, during which the kubelet's message is the latest event of the pod."""
        typed, seen = see(bound(0), bound(1), problems={"uid-train-1-0-abcde": Problem("FailedScheduling", "no room")})
        assert explain(typed, seen).status == "True"


def test_sidecars_that_were_restarted_are_named() -> None:
    last = {"terminated": {"reason": "OOMKilled"}}
    raw = child_pod(
        spec={"initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "fetch"}]},
        status={
            "initContainerStatuses": [
                {"name": "proxy", "restartCount": 1, "lastState": last},
                {"name": "fetch", "restartCount": 5},
            ]
        },
    )
    assert list_restarted_sidecars(raw) == (("proxy", 1, "OOMKilled"),)
    assert list_restarted_sidecars(trim_object("Pod", raw)) == list_restarted_sidecars(raw)
    raw["status"]["initContainerStatuses"][0] = {"name": "proxy", "restartCount": 0}
    assert list_restarted_sidecars(raw) == ()


class TestReadingEvents:
    @pytest.mark.parametrize(("seconds", "queried"), [(4, ()), (5, ("job-1",))])
    def test_events_of_job_with_missing_pods_are_read_after_some_seconds(
        self, seconds: float, queried: tuple[str, ...]
    ) -> None:
        assert list_objects_to_inspect(*see(child_pod(0)), NOW + timedelta(seconds=seconds)) == queried

    def test_queues_are_read_more_often_than_events(self) -> None:
        assert compute_event_poll_delay(*see(jobs=[QUEUED]), NOW + timedelta(days=1), 1) == 60
        assert compute_event_poll_delay(*see(), NOW + timedelta(days=1), 1) == 300

    @pytest.mark.parametrize(("others", "requested"), [(1, 50), (100, 50), (1000, 200), (10_000, 2000)])
    def test_rate_of_reads_is_shared_by_all_waiting_jobs(self, others: int, requested: float) -> None:
        typed, seen = see()
        assert compute_event_poll_delay(typed, seen, NOW + timedelta(seconds=100), others) == requested
        # Other pods do not delay the first read.
        assert compute_event_poll_delay(typed, seen, NOW + timedelta(seconds=1), others) == 4

    def test_workload_of_queued_job_is_read(self) -> None:
        queued = see(jobs=[QUEUED])
        assert list_objects_to_inspect(*queued, NOW + timedelta(seconds=9)) == ("job-1",)
        assert list_objects_to_inspect(*see(jobs=[child_job(suspend=True)]), NOW + timedelta(seconds=9)) == ()
        stopped = see(jobs=[QUEUED], suspend=True)
        assert list_objects_to_inspect(*stopped, NOW + timedelta(seconds=9)) == ()

    @pytest.mark.parametrize(
        ("pods", "changes"),
        [
            ((child_pod(0), child_pod(1)), {}),
            ((), {"suspend": True}),
            ((), {"deleting": True}),
            ((), {"conditions": {"Failed": ""}}),
        ],
    )
    def test_no_events_are_read_for_healthy_job(self, pods: Any, changes: Any) -> None:
        typed, seen = see(*pods, jobs=[child_job(**changes)])
        assert (
            list_objects_to_inspect(typed, seen, NOW + timedelta(hours=1)),
            compute_event_poll_delay(typed, seen, NOW, 1),
        ) == (
            (),
            None,
        )


def test_read_delay_is_that_of_longest_waiting_object() -> None:
    typed, observation = see(bound(0, age=20), bound(1, age=200))
    long, _ = see(bound(0, age=200), bound(1, age=200))
    alone = observe(long, [child_job()], [bound(0, age=200), bound(1, age=200)])
    assert compute_event_poll_delay(typed, observation, NOW, 1) == compute_event_poll_delay(long, alone, NOW, 1)
