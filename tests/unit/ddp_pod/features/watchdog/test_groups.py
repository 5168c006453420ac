"""Process groups: the combination of the records of processes, and the reasons of waits."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from ddp_pod.base.files import write_json
from ddp_pod.base.pod import WorkerRecord
from ddp_pod.contract.failure_record import EVIDENCE_ERROR, EVIDENCE_EXIT_CODE, Failure
from ddp_pod.contract.group_facts import (
    ALONE,
    SEPARATE,
    TOGETHER,
    UNKNOWN,
    WAITING,
    GroupFacts,
)
from ddp_pod.contract.plan import WatchdogConfig
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.features.watchdog.group_waits import Joiner, explain_wait
from ddp_pod.features.watchdog.groups import GroupMonitor, judge_groups
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.rank.group_records import RankGroups, read_groups
from ddp_pod.rank.groups import (
    CONNECTING,
    ENDED,
    JOINING,
    LEFT,
    MEMBER,
    STEPPING,
    GroupRecord,
)
from tests.support.launcher_config import launcher_pod

FILE = "file:" + "///x"
PID = os.getpid()
NOW = 1000.0
JOB = "job-1-0.job:29400"

# ---- the combination


def rank(
    number: int, *records: GroupRecord, steps: bool | None = True, world: int = 2, kind: str = "script"
) -> RankGroups:
    worker = WorkerRecord(PID, number, number, 0, world, kind, NOW - 30, JOB, "run")
    return RankGroups(worker, records, steps)


def member(size: int, of: int = 0, run: str = "run", **values: Any) -> GroupRecord:
    values = {"phase": MEMBER, "since": NOW - 20, **values}
    return GroupRecord(PID, size=size, rank=of, largest=size, largest_rank=of, run=run, store="s:1", **values)


STEPS = GroupRecord(PID, STEPPING, NOW - 20, run="run")
WAITS = GroupRecord(PID, JOINING, NOW - 20, 2, 0, JOB, run="run")


@pytest.mark.parametrize(
    ("ranks", "state", "final"),
    [
        ([rank(0, member(2)), rank(1, member(2, 1))], TOGETHER, TOGETHER),
        ([rank(0, member(2, phase=LEFT, since=NOW))], TOGETHER, TOGETHER),  # k-fold, or the end
        ([rank(0, STEPS)], ALONE, ALONE),
        ([rank(0, STEPS._replace(since=NOW - 1))], None, ALONE),  # it may create the group after its first steps
        ([rank(0, STEPS._replace(library="horovod"))], UNKNOWN, UNKNOWN),
        ([rank(0, member(1, run="inner"))], SEPARATE, SEPARATE),  # bash -c torchrun
        ([rank(0, member(1, run="inner"), steps=False)], None, SEPARATE),
        ([rank(0, member(1, run="inner"), steps=None)], None, SEPARATE),
        ([rank(0, member(2, 0, run="inner"), member(2, 1, run="inner"))], SEPARATE, SEPARATE),
        ([rank(0, member(4, 0), member(4, 1))], TOGETHER, TOGETHER),  # two processes below each of two ranks
        ([rank(0, member(2), member(2), member(2))], TOGETHER, TOGETHER),  # one process after the other
        ([rank(0, member(2), member(1, run="engine"))], TOGETHER, TOGETHER),  # an inference engine beside the rank
        ([rank(0, member(2), world=4), rank(1, member(2, 1), world=4)], SEPARATE, SEPARATE),  # a group in each pod
        ([rank(0, WAITS, steps=False)], None, UNKNOWN),
        ([rank(0, steps=False)], None, UNKNOWN),
        ([rank(0, steps=False, kind="program")], None, UNKNOWN),
        ([rank(0, steps=None)], None, UNKNOWN),
        ([rank(0, STEPS, world=1)], None, None),
        ([], None, None),
    ],
)
def test_groups_are_judged(ranks: list[RankGroups], state: str | None, final: str | None) -> None:
    for has_ended, expected in ((False, state), (True, final)):
        facts = judge_groups(ranks, NOW, has_ended=has_ended)
        assert (facts.state if facts else None) == expected
        assert facts is None or facts.message


def test_ranks_that_show_nothing_are_reported_as_unknown_after_a_minute() -> None:
    assert judge_groups([rank(0, steps=False)], NOW + 20) is None
    facts = judge_groups([rank(0, steps=False, kind="program")], NOW + 40)
    assert facts is not None
    assert facts.state == UNKNOWN
    assert "no Python process" in facts.message
    assert judge_groups([rank(0, WAITS, steps=False)], NOW + 40) is None, "a wait is reported as such"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([rank(0, STEPS), rank(1, STEPS)], ["all 2 ranks", "ranks 0, 1 train alone"]),
        ([rank(0, STEPS._replace(option="--local_rank"))], ["--local_rank", "LOCAL_RANK"]),
        ([rank(1, member(1, run="inner", place="train.py:4"))], ["rank 1", "only 1 rank ", "train.py:4", "launcher"]),
        ([rank(0, steps=None)], ["metrics.autoInstrument"]),
        ([rank(0, GroupRecord(PID, ENDED, library="torch.distributed.rpc"))], ["torch.distributed.rpc"]),
    ],
)
def test_facts_name_rank_and_reason(ranks: list[RankGroups], words: list[str]) -> None:
    facts = judge_groups(ranks, NOW, has_ended=True)
    assert facts is not None
    assert all(word in facts.message for word in words), facts.message


# ---- waits


def joins(number: int, pod: int | None = None, phase: str = JOINING, size: int = 2, **values: Any) -> Joiner:
    own = {"since": 3.0, "as_rank": number, "store": JOB, "place": "train.py:9", **values}
    return Joiner(number, number if pod is None else pod, phase, size=size, job_store=JOB, **own)


def late(number: int, **values: Any) -> Joiner:
    return Joiner(number, number, job_store=JOB, **values)


OWN = {"store": "localhost:12355", "from_environment": True, "phase": CONNECTING}
OTHER_HOST = {"store": "gpu-node:29400", "phase": CONNECTING, "other_host": True}
FREE = {"store": "tracker:23456", "phase": CONNECTING}


@pytest.mark.parametrize(
    ("joiners", "cause", "is_mistake", "words"),
    [
        # A store of its own: in the environment of script or wrapper, or an init_method.
        ([joins(0, **OWN), joins(1, **OWN)], None, True, ["localhost:12355", JOB, "wrapper"]),
        ([joins(0, **{**OWN, "phase": JOINING}), joins(1, **OWN)], None, True, ["rank 1 waits for localhost:12355"]),
        ([joins(0), joins(1, **OWN, assigned="train.py:7")], 1, True, ["from train.py:7"]),
        ([joins(0, **FREE), joins(1, **FREE)], None, True, ["tracker:23456", "init_method", "train.py:9"]),
        ([joins(0, **{**OWN, "phase": JOINING}), late(1)], 0, True, ["localhost:12355"]),  # no other pod can join
        ([joins(0, store=FILE), joins(1, store=FILE)], None, True, [FILE]),
        ([joins(0), joins(1, **OTHER_HOST)], 1, True, ["gpu-node:29400, which is not the job's"]),
        ([joins(0, **FREE), late(1)], 1, True, ["rank 1 has not called"]),  # it may serve that store
        ([joins(0, store="job:23456"), joins(1, store="job:23456")], 0, False, ["2"]),  # all of them have reached it
        ([joins(0), joins(1, store="10.0.0.1:29400")], 0, False, []),  # another name of the same host
        # Wrong numbers.
        ([joins(0), joins(1, as_rank=0)], 1, True, ["2 processes joined as rank 0", "none as rank 1", "LOCAL_RANK"]),
        ([joins(0, as_rank=1), joins(1)], 0, True, ["joined as rank 1", "none as rank 0"]),
        ([joins(0, size=4), joins(1, size=4)], None, True, ["waits for 4 ranks, the job has 2"]),
        ([joins(0, size=4, as_rank=0), joins(0, size=4, as_rank=1), joins(1, size=4, as_rank=2)], None, True, ["3"]),
        ([joins(0, size=4, as_rank=0), joins(0, size=4, as_rank=1), late(1)], 1, True, ["rank 1 has not called"]),
        ([joins(1), Joiner(0, 0, MEMBER, size=1, place="a.py:1")], 0, True, ["group of only 1", "a.py:1"]),
        # Ranks that do not come.
        ([joins(0), late(1, place="load (data.py:13)")], 1, True, ["data.py:13", "rank 0 waits", "train.py:9"]),
        (
            [joins(1), late(0, ended=True, place="done")],
            0,
            True,
            ["rank 0 has ended with exit code 0 and the last line 'done'"],
        ),
        ([joins(0)], 0, False, ["1 of 2 ranks"]),  # the other pod has not reported
        ([joins(0), joins(1)], 0, False, ["waits in init_process_group"]),  # the network
    ],
)
def test_wait_is_explained(joiners: list[Joiner], cause: int | None, is_mistake: bool, words: list[str]) -> None:
    facts = explain_wait(joiners, 2, is_local=False)
    assert facts is not None
    assert (facts.state, facts.rank, facts.is_mistake, facts.since) == (WAITING, cause, is_mistake, 3.0)
    text = f"{facts.message}; {facts.remedy}"
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("joiners", "is_local", "is_final"),
    [
        ([joins(0), joins(1, as_rank=0)], False, True),
        ([joins(0), joins(1, as_rank=0), joins(1, as_rank=1)], False, False),  # a launcher inside the command
        ([joins(0, **OWN), joins(1, **OWN)], True, True),
        ([joins(0, **OWN), joins(1, **OWN)], False, False),
        ([joins(0, **FREE), joins(1, **FREE)], True, False),  # it may be served later
        ([joins(0, **{**OWN, "phase": JOINING}), joins(1, **OWN)], True, False),
    ],
)
def test_wait_is_final_if_nobody_else_can_end_it(joiners: list[Joiner], is_local: bool, is_final: bool) -> None:
    facts = explain_wait(joiners, 2, is_local=is_local)
    assert facts is not None
    assert facts.is_final is is_final, facts.message


def test_wait_needs_a_waiting_rank_and_loopback_serves_one_machine() -> None:
    assert explain_wait([late(0), Joiner(1, 1, MEMBER, size=1)], 2, is_local=False) is None
    shared = {**OWN, "phase": JOINING}
    facts = explain_wait([joins(0, **shared), joins(1, **shared)], 2, is_local=True)
    assert facts is not None
    assert not facts.is_mistake


@pytest.mark.parametrize(
    ("failure", "records", "fatal"),
    [
        ({"category": "Network", "secondary": True}, [WAITS], True),
        ({"category": "NCCL"}, [WAITS], True),
        ({"category": "Unknown", "evidence": EVIDENCE_EXIT_CODE}, [WAITS], True),  # bash train.sh
        ({"category": "UserError"}, [WAITS], False),  # its own exception, after a wait that it gave up
        ({"category": "Network", "secondary": True}, [WAITS._replace(largest=2)], False),  # a later group
        ({"category": "Network", "secondary": True}, [WAITS._replace(run="inner")], False),
        ({"category": "Network", "secondary": True}, [], False),
    ],
)
def test_failure_of_a_wait_is_the_mistake_that_causes_it(
    tmp_path: Path, failure: dict[str, Any], records: list[GroupRecord], fatal: bool
) -> None:
    for name in ("groups", "workers"):
        (tmp_path / name).mkdir()
    worker = {"pid": PID, "rank": 0, "localRank": 0, "restart": 0, "worldSize": 2, "run": "run", "started": 1.0}
    write_json(str(tmp_path / "workers" / "0.json"), worker)
    for number, record in enumerate(records):
        write_json(str(tmp_path / "groups" / f"0.{number}.json"), record._asdict())
    monitor = GroupMonitor(launcher_pod(tmp_path, nodes=2), cast(RankReader, None))
    before = Failure(rank=0, local_rank=0, message="timed out", **{"evidence": EVIDENCE_ERROR, **failure})
    assert monitor.explain(before) == before, "no wait is known"
    monitor.job_wait = GroupFacts(WAITING, 2, "rank 1 is late", "be in time", rank=1, pod=1, is_mistake=True)
    after = monitor.explain(before)
    assert (after != before) is fatal
    if fatal:
        assert (after.category, after.container_exit_code, after.secondary) == ("UserError", 81, False)
        assert (after.rank, after.local_rank, after.pod_index, after.remedy) == (1, None, 1, "be in time")
        assert after.message == "rank 1 is late; rank 0 gave up: timed out"
        assert after.evidence == EVIDENCE_ERROR, "the last lines of the output do not replace it"
    monitor.job_wait = dataclasses.replace(monitor.job_wait, is_mistake=False)
    assert monitor.explain(before) == before


def test_hosts_are_different_if_their_addresses_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"job": ["10.0.0.1"], "alias": ["10.0.0.1"], "other": ["10.0.0.2"]}
    problem = socket.EAI_NONAME

    def resolve(host: str, *arguments: object, **options: object) -> list[tuple[Any, ...]]:
        if host not in known:
            raise socket.gaierror(problem, "no such name")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monitor = GroupMonitor(launcher_pod(tmp_path, nodes=2), cast(RankReader, None))
    differ = monitor._has_other_host
    assert [differ(f"{host}:1", "job:1") for host in ("job", "alias", "other", "absent")] == [False, False, True, True]
    assert not differ("other:1", "absent:1"), "the name service may not respond"
    assert not differ("", "job:1")
    problem = socket.EAI_AGAIN
    assert not differ("unknown:1", "job:1"), "the name service does not respond now"
    problem = socket.EAI_NONAME
    assert differ("unknown:1", "job:1")


def test_rank_that_gave_up_its_wait_has_called_init_process_group(tmp_path: Path) -> None:
    for name in ("groups", "workers"):
        (tmp_path / name).mkdir()
    worker = {"pid": 0, "rank": 0, "localRank": 0, "restart": 0, "worldSize": 2, "run": "run", "started": 1.0}
    write_json(str(tmp_path / "workers" / "0.json"), worker)
    ended = GroupRecord(999_999_999, CONNECTING, since=1.0, size=2, store="a:1", place="train.py:9", run="run")
    write_json(str(tmp_path / "groups" / "0.0.json"), ended._asdict())
    monitor = GroupMonitor(launcher_pod(tmp_path, nodes=2), cast(RankReader, None))
    (joiner,) = monitor._build_joiners(read_groups(monitor._pod)[0])
    assert (joiner.phase, joiner.place, joiner.ended) == (CONNECTING, "train.py:9", False)


@pytest.mark.parametrize(
    ("final", "since", "action", "nested", "ended"),
    [
        (True, 61.0, "Restart", False, True),
        (True, 59.0, "Restart", False, False),
        (False, 61.0, "Restart", False, False),
        (True, 61.0, "Report", False, False),
        (True, 61.0, "Restart", True, False),  # by a launcher inside the command, which may start more processes
        (True, 61.0, "Restart", "program", True),  # by the only process of a shell
    ],
)
def test_rank_whose_wait_cannot_end_is_ended(
    tmp_path: Path, final: bool, since: float, action: str, nested: bool | str, ended: bool
) -> None:
    for name in ("groups", "workers", "errors"):
        (tmp_path / name).mkdir()
    process = subprocess.Popen(["sleep", "600"])
    try:
        worker = {"pid": process.pid, "rank": 0, "localRank": 0, "worldSize": 2, "run": "run", "started": 1.0}
        write_json(str(tmp_path / "workers" / "0.json"), {**worker, "restart": 0, "kind": nested or "script"})
        waits = GroupRecord(
            PID if nested else process.pid,
            JOINING,
            since=NOW - since,
            size=2,
            store="a:1",
            place="train.py:9",
            run="run",
        )
        write_json(str(tmp_path / "groups" / "0.0.json"), waits._asdict())
        pod = launcher_pod(tmp_path, watchdog=WatchdogConfig(900, 900, 900, action))
        monitor = GroupMonitor(pod, cast(RankReader, None))
        monitor.job_wait = GroupFacts(
            WAITING, 2, "rank 1 has ended", "call it", 1, 0, NOW - since, is_mistake=True, is_final=final
        )
        monitor._end_wait(read_groups(pod), NOW)
        if ended:
            assert process.wait(60) == -signal.SIGKILL
        assert (process.poll() is not None) is ended
        assert (tmp_path / "errors" / "0.json").exists() is ended
    finally:
        process.kill()
        process.wait()
    if ended:
        (failure,) = [monitor.explain(examine_worker(pod, WorkerEnd(-9)))]
        assert (failure.message, failure.remedy, failure.rank) == ("rank 1 has ended", "call it", 1)
        assert failure.container_exit_code == 81
