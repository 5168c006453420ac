"""Process groups: the records of processes, their combination, and the reasons of waits."""

from __future__ import annotations

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

from ddp_pod.contract.group_facts import (
    GROUP_STATES,
    TOGETHER,
    UNKNOWN,
    WAITING,
    GroupFacts,
)
from ddp_pod.contract.records import read_record, to_json
from ddp_pod.rank import groups as rank_groups
from ddp_pod.rank.group_records import parse_record
from ddp_pod.rank.groups import (
    ENDED,
    JOINING,
    LEFT,
    MEMBER,
    STEPPING,
    GroupRecord,
    GroupRecorder,
)

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


# ---- the facts of a pod


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
