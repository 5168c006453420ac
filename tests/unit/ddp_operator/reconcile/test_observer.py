"""Reads beside a resource and its children: pages, Events and labels, how often, and in which order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api import child_names, constants
from ddp_operator.api.cluster import Key
from ddp_operator.api.status import Status
from ddp_operator.manifests.children import load_launcher
from ddp_operator.reading.objects import view_pod
from ddp_operator.reconcile.limits import MAX_BYTES, MAX_PODS, PageBudget, sample_pods
from tests.support.builders import (
    NOW,
    UID,
    Json,
    child_job,
    child_pod,
    job,
    last_words,
    observe,
    page,
    template,
    trainer,
)
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.observing import Answers, Look
from tests.support.odd_objects import ODD_VALUES, replace_part

STATUS = Status(attempt=1, job_name="train-1", start_time=NOW).remember(nodes=2)


class TestTurns:
    async def test_jobs_whose_pods_do_not_run_are_counted(self) -> None:
        look = Look()
        assert (await look.at(name="a", seconds=60)).waiting_jobs == 1
        assert (await look.at(name="b", seconds=60)).waiting_jobs == 2
        running = [child_pod(index, name="a") for index in range(2)]
        assert (await look.at(*running, name="a", seconds=60)).waiting_jobs == 1
        look.observer.forget(Key("default", "b"))
        assert (await look.at(*running, name="a", seconds=60)).waiting_jobs == 0


class TestBudgetOfPages:
    PODS = tuple(child_pod(index) for index in range(40))

    async def test_restarts_reported_every_11_seconds_read_no_more_than_budget_of_minute(self) -> None:
        look = Look(Answers(**{f"pod{index}": "x" * 2**18 for index in range(40)}))
        for turn in range(5):
            look.cluster.pages["pod0"] = page(step=3, phase="Running", restarts=turn + 1)
            await look.at(*self.PODS, seconds=11 * turn)
        own = [call for call in look.cluster.asked if call == "page of train-1-0-abcde"]
        assert len(own) == 5
        assert len(look.cluster.asked) - len(own) <= MAX_BYTES / 2**18 + 1
        await look.at(*self.PODS, seconds=11 * 6)
        assert len(look.cluster.asked) - len(own) > MAX_BYTES / 2**18 + 1

    async def test_budget_is_renewed_after_minute_and_after_clock_change(self) -> None:
        budget = PageBudget()
        budget.renew(NOW)
        budget.seconds_left = 0.0
        budget.renew(NOW + timedelta(seconds=59))
        assert budget.spent
        budget.renew(NOW - timedelta(seconds=61))
        assert not budget.spent


class TestReadPage:
    async def test_of_pod_0_is_read_in_intervals(self) -> None:
        look = Look(Answers(pod0=page(step=3, phase="Running")))
        pods = [child_pod(0), child_pod(1)]
        first = await look.at(*pods)
        assert (first.page_requested, first.page is not None) == (True, True)
        assert first.page.progress.step == 3
        again = await look.at(*pods, seconds=0.1)
        assert (again.page_requested, again.page) == (False, None)
        assert (await look.at(*pods, seconds=30)).page_requested

    async def test_unresponsive_page_is_requested_with_backoff(self) -> None:
        look = Look()
        pods = [child_pod(0), child_pod(1)]
        asked = [second for second in range(0, 301, 10) if (await look.at(*pods, seconds=second)).page_requested]
        assert asked == [0, 10, 20, 40, 80, 140, 200, 260]
        look.cluster.pages["pod0"] = page(step=3, phase="Running")
        assert [(await look.at(*pods, seconds=second)).page_requested for second in (320, 330, 340)] == [True] * 3

    @pytest.mark.parametrize("master", [child_pod(0, "Pending"), child_pod(0, deleting=True), child_pod(1)])
    async def test_page_of_stopped_pod_is_not_read(self, master: Json) -> None:
        look = Look()
        observation = await look.at(master)
        assert (observation.page_requested, [call for call in look.cluster.asked if "page" in call]) == (False, [])


async def test_pods_of_deleted_job_are_timed_until_deleted() -> None:
    look = Look()
    orphan = child_pod(0, owner="gone")
    assert (await look.at(orphan, jobs=[], seconds=5)).orphaned_since == NOW + timedelta(seconds=5)
    assert (await look.at(orphan, jobs=[], seconds=9)).orphaned_since == NOW + timedelta(seconds=5)
    assert (await look.at(jobs=[], seconds=10)).orphaned_since is None
    assert (await look.at(orphan, jobs=[], seconds=20)).orphaned_since == NOW + timedelta(seconds=20)


async def test_lost_labels_are_searched_after_grace_for_late_watches() -> None:
    look = Look()
    orphan = child_pod(0, owner="gone")
    for seconds in (0, 1, 60, 61, 3600):
        await look.at(orphan, jobs=[], seconds=seconds)
    assert look.cluster.asked.count("labels") == 2
    await look.at(*(child_pod(index) for index in range(2)), seconds=3601)
    await look.at(orphan, jobs=[], seconds=3602)
    assert look.cluster.asked.count("labels") == 2


async def test_forbidden_node_is_neither_ready_nor_deleted() -> None:
    unready = NOW - timedelta(seconds=100)
    pods = [child_pod(0, unready=unready, node="forbidden"), child_pod(1, unready=unready, node="away")]
    observation = await Look().at(*pods)
    assert {name: (node.ready, node.message) for name, node in observation.nodes.items()} == {
        "forbidden": (None, ""),
        "away": (False, "the node was deleted"),
    }


def owned(kind: str, name: str) -> Json:
    owner = {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": "train",
        "uid": UID,
        "controller": True,
    }
    metadata = {"name": name, "namespace": "default", "uid": name, "ownerReferences": [owner]}
    return {"kind": kind, "metadata": metadata}


def with_launcher(name: str, **changes: Any) -> Json:
    made = child_job(**changes)
    volume = {"name": constants.LAUNCHER_VOLUME, "configMap": {"name": name}}
    made["spec"]["template"] = {"spec": {"volumes": [volume]}}
    return made


OURS = child_names.launcher_config_map_name(load_launcher().digest)


KNOWN = STATUS.remember(children=("train",))
"""A status with the UID of the Service."""


class TestShared:
    """The Service, the ConfigMap and the policy that all attempts share."""

    @pytest.mark.parametrize(
        ("mounted", "present", "finished", "complete", "lost"),
        [
            (OURS, OURS, False, True, False),
            (OURS, "", False, False, False),
            (OURS, "other", False, False, False),
            ("other", "other", False, True, False),
            ("other", OURS, False, True, True),
            ("other", OURS, True, True, False),
            ("", OURS, False, True, False),
        ],
    )
    async def test_launcher_of_other_operator_is_lost_and_own_is_recreated(
        self, mounted: str, present: str, finished: bool, complete: bool, lost: bool
    ) -> None:
        conditions = {"Failed": "why"} if finished else {}
        made = with_launcher(mounted, conditions=conditions) if mounted else child_job()
        maps = (owned("ConfigMap", present),) if present else ()
        observation = await Look().at(
            child_pod(0), jobs=[made], services=(owned("Service", "train"),), config_maps=maps, status=KNOWN
        )
        assert (observation.shared_complete, observation.launcher_lost) == (complete, lost)

    async def test_foreign_object_is_not_observed(self) -> None:
        foreign = {"kind": "Service", "metadata": {"name": "train", "namespace": "default"}}
        observation = await Look().at(services=(foreign,), config_maps=(owned("ConfigMap", OURS),), status=KNOWN)
        assert (observation.shared, observation.shared_complete) == (frozenset(), False)

    async def test_service_whose_uid_is_not_recorded_is_compared(self) -> None:
        observation = await Look().at(services=(owned("Service", "train"),))
        assert (observation.shared, observation.shared_complete) == (frozenset(), False)

    @pytest.mark.parametrize(("name", "complete"), [("train-rendezvous-u-1", False), ("credentials", True)])
    async def test_secret_of_job_that_kubelet_does_not_find_is_recreated(self, name: str, complete: bool) -> None:
        pod = child_pod(0, "Pending")
        waiting = {"reason": "CreateContainerConfigError", "message": f'secret "{name}" not found'}
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": {"waiting": waiting}}]
        made = child_job()
        reference = {"secretKeyRef": {"name": "train-rendezvous-u-1", "key": constants.RENDEZVOUS_KEY}}
        env = [{"name": constants.ENV_RENDEZVOUS_SECRET, "valueFrom": reference}]
        made["spec"]["template"] = template(trainer(env=env))
        observation = await Look().at(pod, jobs=[made], services=(owned("Service", "train"),), status=KNOWN)
        assert observation.shared_complete is complete
        assert (("Secret", "train-rendezvous-u-1") in observation.shared) is complete


async def test_unresponsive_page_is_reported_until_it_responds() -> None:
    harness = await ReconcilerHarness().settle()
    harness.run_pods()
    harness.cluster.page = page(step=5, phase="Running")
    await harness.settle()
    assert harness.state("Progressing") == ("True", "Training")
    for text, expected in ((None, ("Unknown", "NoMetricsPage")), (harness.cluster.page, ("True", "Training"))):
        harness.cluster.page = text
        for _ in range(60):
            harness.clock.advance(1)
            await harness.reconcile()
        assert harness.state("Progressing") == expected
        assert harness.state("Rendezvoused")[0] == "True", "what was seen stands"


async def test_failures_before_a_restart_are_read_every_ten_seconds_while_pods_join() -> None:
    joining = page(phase="Rendezvous", restarts=1)
    look = Look(Answers(pod0=joining, pod1=page(phase="Rendezvous", answered=last_words("UserError", restarts=1))))
    read = [
        len((await look.at(child_pod(0), child_pod(1), seconds=seconds)).failures_in_place) for seconds in (1, 3, 5, 20)
    ]
    assert read == [1, 0, 0, 1]


class TestOddAnswers:
    """Objects of other owners in any shape: a pass continues without them."""

    @pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
    @pytest.mark.parametrize("part", ["spec", "status", "status.conditions", "spec.taints", "metadata"])
    async def test_odd_node_has_no_trouble(self, part: str, value: Any) -> None:
        cluster = Answers()
        good = {"metadata": {}, "spec": {"taints": [{"key": "a"}]}, "status": {"conditions": [{"type": "b"}]}}
        cluster.nodes = replace_part(good, part, value)
        observation = await Look(cluster).at(child_pod(0), child_pod(1), seconds=60)
        assert (len(observation.pods), observation.troubles or {}) == (2, {})

    @pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
    @pytest.mark.parametrize("part", ["spec", "status", "metadata.annotations", "status.containerStatuses"])
    async def test_odd_pod_is_left_out(self, part: str, value: Any) -> None:
        odd = replace_part(child_pod(0, code=1), part, value)
        observation = await Look().at(odd, child_pod(1), seconds=60)
        assert child_pod(1)["metadata"]["name"] in {pod.name for pod in observation.pods}


def test_few_pods_are_all_sampled() -> None:
    running = [view_pod(child_pod(index)) for index in range(5)]
    peers = [view_pod(child_pod(5, "Pending")), view_pod(child_pod(6, deleting=True))]
    assert [pod.index for pod in sample_pods([*running, *peers], 5)] == [1, 2, 3, 4]
    assert [pod.index for pod in sample_pods(running, 3)] == [1, 3]


def test_pods_are_even_spread_of_many() -> None:
    pods = observe(job(status=STATUS), [child_job()], [child_pod(n) for n in range(100)]).pods_of(1)
    chosen = sample_pods(pods)
    assert len(chosen) == MAX_PODS - 1
    assert len({pod.index for pod in chosen}) == MAX_PODS - 1
    assert max(pod.index for pod in chosen) > 80
    assert [pod.index for pod in sample_pods(pods[:4])] == [1, 2, 3]
