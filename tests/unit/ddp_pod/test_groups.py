"""Process groups: the records of processes, their combination, and the reasons of waits."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_pod.base.files import write_json
from ddp_pod.base.pod import WorkerRecord
from ddp_pod.contract.failure_record import EVIDENCE_ERROR, EVIDENCE_EXIT_CODE, Failure
from ddp_pod.contract.group_facts import (
    ALONE,
    GROUP_STATES,
    SEPARATE,
    TOGETHER,
    UNKNOWN,
    WAITING,
    GroupFacts,
)
from ddp_pod.contract.records import read_record, to_json
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.rank import groups as rank_groups
from ddp_pod.rank.groups import (
    CONNECTING,
    ENDED,
    JOINING,
    LEFT,
    MEMBER,
    STEPPING,
    GroupRecord,
    GroupRecorder,
)
from ddp_pod.watchdog.group_waits import Joiner, explain_wait
from ddp_pod.watchdog.groups import GroupMonitor, RankGroups, judge_groups, parse_record
from tests.support.launcher_config import launcher_pod

FILE = "file:" + "///x"
PID = os.getpid()
NOW = 1000.0
JOB = "job-1-0.job:29400"

# ---- the record of a process

FAKE_TORCH = """
import os
world = None
class TCPStore:
    host, port = "store", 7
def rendezvous(url, rank=-1, world_size=-1, timeout=None):
    yield TCPStore(), int(os.environ["RANK"]) if rank < 0 else rank, 4 if world_size < 0 else world_size
def _new_process_group_helper(size, rank, ranks, backend, store, name=""):
    if size == 99:
        raise RuntimeError("timed out")
    return type("Group", (), {"size": lambda self: size, "rank": lambda self: rank})()
def _update_default_pg(group):
    global world
    world = group
def init_process_group(url="env://", rank=-1, world_size=-1, store=None):
    if store is None:
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=3))
    _update_default_pg(_new_process_group_helper(world_size, rank, [], "gloo", store))
def new_group(ranks):
    return _new_process_group_helper(len(ranks), 0, ranks, "gloo", TCPStore())
def destroy_process_group():
    _update_default_pg(None)
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any] | None]:
    """Return a function that runs a program with a recorder, and returns the record; None without one."""
    (tmp_path / "groups").mkdir()
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "fake_groups.py").write_text(FAKE_TORCH)
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setattr(rank_groups, "_MODULE", "fake_groups")
    for name in ("fake_groups", *rank_groups._LIBRARIES):
        monkeypatch.setitem(sys.modules, name, sys)  # restored at the end of the test
        del sys.modules[name]
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def run(program: str) -> dict[str, Any] | None:
        script = tmp_path / "train.py"
        script.write_text(program)
        recorder = GroupRecorder(str(tmp_path), 0)
        monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
        exec(compile(program, str(script), "exec"), {"os": os, "sys": sys, "recorder": recorder})
        assert recorder not in sys.meta_path or "fake_groups" not in sys.modules, "it has stepped aside"
        path = tmp_path / "groups" / f"0.{PID % rank_groups.SLOTS}.json"
        return cast(dict[str, Any], json.loads(path.read_text())) if path.exists() else None

    return run


INIT = "import fake_groups as dist\ndist.init_process_group()\n"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (INIT, {"phase": MEMBER, "largest": 4, "largest_rank": 3, "store": "a:1", "place": "train.py:2"}),
        (f"{INIT}dist.destroy_process_group()", {"phase": LEFT, "largest": 4}),
        (
            f"{INIT}dist.destroy_process_group()\ndist.init_process_group(rank=0, world_size=2)",
            {"phase": MEMBER, "size": 2, "largest": 4, "largest_rank": 3},
        ),
        (f"{INIT}dist.new_group([0, 1])", {"phase": MEMBER, "size": 4}),
        ("from fake_groups import init_process_group as begin\nbegin(rank=1, world_size=2)", {"largest": 2}),
        (
            "import fake_groups as d\nd.init_process_group(store=d.TCPStore(), rank=0, world_size=2)",
            {"store": "store:7"},
        ),
        (
            "import fake_groups as d\nd.init_process_group('tcp://h:5', 0, 2)",
            {"store": "h:5", "from_environment": False},
        ),
        (
            "import fake_groups as d\nos.environ['MASTER_PORT'] = '2'\n\nd.init_process_group()",
            {"store": "a:2", "from_environment": True, "assigned": "train.py:2"},
        ),
        (
            "import fake_groups as d\nos.environ.update(MASTER_ADDR='b')\nif os.environ['MASTER_ADDR'] == 'b':\n"
            "    d.init_process_group()",
            {"store": "b:1", "assigned": "train.py:2"},
        ),
        (
            "import fake_groups as d\ntry:\n    d.init_process_group('file://' '/x', 0, 99)\nexcept RuntimeError: pass",
            {"phase": JOINING, "size": 99, "largest": 0, "store": FILE},
        ),
        ("recorder.note_step()", {"phase": STEPPING, "library": "", "option": ""}),
        (f"{INIT}recorder.note_step()\nrecorder.close()", {"phase": MEMBER}),
        ("sys.modules['jax'] = sys\nrecorder.note_step()", {"phase": STEPPING, "library": "jax"}),
        ("recorder.close()", {"phase": ENDED}),
        ("import fake_groups\nrecorder.close()", {"phase": ENDED}),
        ("pass", None),
    ],
)
def test_group_or_its_absence_is_recorded(
    record: Callable[[str], dict[str, Any] | None], program: str, expected: dict[str, Any] | None
) -> None:
    result = record(program)
    assert result == expected or (result is not None and expected is not None and {**result, **expected} == result)


@pytest.mark.parametrize(
    ("argv", "option"), [([], "--local_rank"), (["--local_rank=0"], ""), (["--local-rank", "0"], "")]
)
def test_unused_local_rank_option_is_recorded(
    record: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: Sequence[str], option: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    assert record('recorder.note_step()\n"""parser.add_argument("--local_rank", type=int)"""')["option"] == option


def test_forked_child_has_own_record(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = "pid = os.fork()\nif not pid:\n    recorder.note_step()\n    os._exit(0)\nos.waitpid(pid, 0)"
    assert record(INIT + fork)["phase"] == MEMBER
    phases = [json.loads(path.read_text())["phase"] for path in (tmp_path / "groups").iterdir()]
    assert sorted(phases) == [MEMBER, STEPPING]


@pytest.mark.parametrize(
    ("slots", "phases"), [(1, [MEMBER]), (2, [MEMBER, STEPPING]), (64, [ENDED, ENDED, MEMBER, STEPPING])]
)
def test_process_replaces_only_a_record_that_says_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, phases: list[str]
) -> None:
    monkeypatch.setattr(rank_groups, "SLOTS", slots)
    (tmp_path / "groups").mkdir()
    for process, end in enumerate(("close", "step", "group", "close")):
        monkeypatch.setattr(os, "getpid", lambda pid=PID + slots * process: pid)
        recorder = GroupRecorder(str(tmp_path), 0)
        if end == "close":
            recorder.close()
        if end == "step":
            recorder.note_step()
        if end == "group":
            recorder._note_group(SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    records = [json.loads(path.read_text()) for path in (tmp_path / "groups").iterdir()]
    assert sorted(record["phase"] for record in records) == phases


@pytest.mark.parametrize("raw", [{"pid": "1"}, {"size": 1.5}, {"from_environment": 1}, {"store": 3}, {"since": None}])
def test_invalid_record_is_ignored(raw: dict[str, Any]) -> None:
    assert parse_record(raw) is None
    assert parse_record({"store": "x" * 9999, "unknown": 1}) == GroupRecord(store="x" * 160)


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


@pytest.mark.parametrize(
    "facts",
    [GroupFacts(TOGETHER, 2), GroupFacts(WAITING, 8, "m", "r", 5, 6, 7.0, is_mistake=True)],
)
def test_facts_survive_their_way_to_the_operator(facts: GroupFacts) -> None:
    assert read_record(GroupFacts, {**json.loads(json.dumps(to_json(facts))), "later": [1]}) == facts


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.dictionaries(st.sampled_from(["state", "worldSize", "message", "rank", "since", "isMistake"]), JSON) | JSON)
def test_any_record_of_a_pod_is_read_without_error(members: Any) -> None:
    if isinstance(members, dict):
        members = {"state": UNKNOWN, "worldSize": 2, **members}
    facts = read_record(GroupFacts, members)
    assert facts.state in GROUP_STATES
    assert len(json.dumps(to_json(facts))) < 10_000


# ---- waits


def joins(number: int, pod: int | None = None, phase: str = JOINING, size: int = 2, **values: Any) -> Joiner:
    own = {"since": 3.0, "as_rank": number, "store": JOB, "place": "train.py:9", **values}
    return Joiner(number, number if pod is None else pod, phase, size=size, job_store=JOB, **own)


def late(number: int, **values: Any) -> Joiner:
    return Joiner(number, number, job_store=JOB, **values)


OWN = {"store": "localhost:12355", "from_environment": True, "phase": CONNECTING}
FREE = {"store": "tracker:23456", "phase": CONNECTING}


@pytest.mark.parametrize(
    ("joiners", "cause", "is_mistake", "words"),
    [
        # A store of its own: in the environment of script or wrapper, or an init_method.
        ([joins(0, **OWN), joins(1, **OWN)], 0, True, ["localhost:12355", JOB, "wrapper"]),
        ([joins(0, **{**OWN, "phase": JOINING}), joins(1, **OWN)], 1, True, ["rank 1 waits for localhost:12355"]),
        ([joins(0), joins(1, **OWN, assigned="train.py:7")], 1, True, ["from train.py:7"]),
        ([joins(0, **FREE), joins(1, **FREE)], 0, True, ["tracker:23456", "init_method", "train.py:9"]),
        ([joins(0, **{**OWN, "phase": JOINING}), late(1)], 0, True, ["localhost:12355"]),  # no other pod can join
        ([joins(0, store=FILE), joins(1, store=FILE)], 0, True, [FILE]),
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
        ([joins(1), late(0, ended=True)], 0, True, ["rank 0 has ended"]),
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
