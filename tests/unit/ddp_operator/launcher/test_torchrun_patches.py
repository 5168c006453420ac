"""What the launcher looks for in torchrun's private parts, and what it does where this torch has other ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_operator.launcher.torchrun.torchrun_patches import (
    SignalGate,
    TorchrunPatches,
    adapt_torchrun,
    find_ended_peers,
    find_missing_parts,
    have_all_ended,
)
from tests.support import ROOT
from tests.support.launcher_config import launcher_pod


def test_this_torch_has_all_private_parts() -> None:
    assert find_missing_parts() == []


def test_the_stand_in_of_the_soak_has_them_too() -> None:
    code = "from ddp_operator.launcher.torchrun.torchrun_patches import find_missing_parts; print(find_missing_parts())"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/drills/stub:{ROOT}/operator"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


def hide_member(monkeypatch: pytest.MonkeyPatch) -> str:
    rounds: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    monkeypatch.delattr(rounds._BackendRendezvousStateHolder, "_sanitize")
    monkeypatch.delattr(rounds._RendezvousStateHolder, "_sanitize", raising=False)
    return "dynamic_rendezvous:_BackendRendezvousStateHolder._sanitize"


def hide_class(monkeypatch: pytest.MonkeyPatch) -> str:
    rounds: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    monkeypatch.delattr(rounds, "_NodeDescGenerator")
    return "dynamic_rendezvous:_NodeDescGenerator.generate"


def hide_attribute(monkeypatch: pytest.MonkeyPatch) -> str:
    server: Any = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    monkeypatch.setattr(server.LocalElasticAgent, "__init__", lambda self: None)
    return "local_elastic_agent:LocalElasticAgent()._pcontext"


@pytest.mark.parametrize("hide", [hide_member, hide_class, hide_attribute])
def test_torchrun_stays_as_it_is_where_this_torch_lacks_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hide: Callable[..., str]
) -> None:
    server: Any = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    members = {name: getattr(server.LocalElasticAgent, name) for name in dir(server.LocalElasticAgent)}
    missing = hide(monkeypatch)
    told: list[dict[str, Any]] = []
    adapt_torchrun(launcher_pod(tmp_path, nodes=2), told.append, lambda event: False, None)()
    (line,) = capsys.readouterr().err.splitlines()
    assert f" lacks {missing}: torchrun runs as it is." in line
    assert told == [{"phase": "Running"}]
    monkeypatch.undo()
    assert members == {name: getattr(server.LocalElasticAgent, name) for name in members}


def test_spares_are_refused_where_this_torch_lacks_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = hide_class(monkeypatch)
    with pytest.raises(RuntimeError, match=rf"lacks {missing}: with torchrun as it is .*; remove spec.spares"):
        adapt_torchrun(launcher_pod(tmp_path, nodes=2, spares=1), [].append, lambda event: False, None)


class Agent:
    """What of torchrun's agent is looked at: two ranks, of which the first has ended well, and a store."""

    def __init__(self, add: Callable[[str, int], int]) -> None:
        codes = {0: 0, 1: 1}
        ended = {rank: SimpleNamespace(proc=SimpleNamespace(poll=partial(codes.get, rank))) for rank in codes}
        workers = [SimpleNamespace(local_rank=rank, global_rank=rank + 4) for rank in codes]
        self._pcontext = SimpleNamespace(subprocess_handlers=ended)
        self._worker_group = SimpleNamespace(workers=workers)
        self._store = SimpleNamespace(add=add)


def test_who_has_ended_well_is_known_from_the_processes_and_the_store() -> None:
    def lost(key: str, amount: int) -> int:
        raise ConnectionError

    assert find_ended_peers(Agent(lambda key, amount: 2)) == ([4], 2)
    assert find_ended_peers(Agent(lost)) == ([4], 0)


@pytest.mark.parametrize(("codes", "restarts"), [((None, None), 1), ((0, None), 1), ((None, 1), 0), ((-9, None), 0)])
def test_a_pods_own_failure_goes_before_the_restart_that_other_pods_ask_for(
    tmp_path: Path, codes: tuple[int | None, ...], restarts: int
) -> None:
    told: list[dict[str, Any]] = []
    done: list[str] = []
    patches = TorchrunPatches(launcher_pod(tmp_path, nodes=2), told.append, lambda event: True, None)
    agent = Agent(lambda key, amount: 0)
    agent._worker_group.spec = SimpleNamespace(max_restarts=3)
    processes = agent._pcontext.subprocess_handlers
    for rank in range(2):
        processes[rank].proc.poll = partial(codes.__getitem__, rank)
    patches._restart(lambda agent: done.append("restarted"), agent)
    assert (len(done), told) == (restarts, [{"restart": True}] * restarts)
    patches._failed = True  # torchrun has looked again, and asks for the same
    patches._restart(lambda agent: done.append("restarted"), agent)
    assert len(done) == restarts + 1


def test_pod_0_waits_a_moment_for_the_others_where_its_success_is_enough() -> None:
    ended = iter([0, 1, 2])
    agent = Agent(lambda key, amount: next(ended))
    agent._worker_group.group_world_size = 3
    assert have_all_ended(agent, 60.0)
    assert list(ended) == []
    alone = Agent(lambda key, amount: 1)
    alone._worker_group.group_world_size = 3
    assert not have_all_ended(alone, 0.0)
    assert not have_all_ended(SimpleNamespace(), 60.0)  # no store any more


def test_a_store_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr("ddp_operator.launcher.torchrun.rendezvous._SECONDS_FOR_STORE", 0.05)
    assert find_ended_peers(Agent(lambda key, amount: int(answered.wait(300)))) == ([4], 0)
    answered.set()


def test_a_signal_to_the_agent_waits_until_the_workers_that_it_starts_are_known() -> None:
    class Torchrun:
        @staticmethod
        def _terminate_process_handler(number: int, frame: object) -> None:
            raise KeyboardInterrupt(number)

    known: list[str] = []

    def stop_amid() -> None:
        with gate:
            Torchrun._terminate_process_handler(15, None)
            known.append("worker")

    gate = SignalGate(Torchrun)
    with pytest.raises(KeyboardInterrupt, match="15"):
        stop_amid()
    assert known == ["worker"]
    with pytest.raises(KeyboardInterrupt, match="2"):
        Torchrun._terminate_process_handler(2, None)
