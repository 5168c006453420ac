"""The root cause of a restart where peers notice a failure before the failed rank has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher_pods import PodEnd, PodsFactory, launch_pods

pytestmark = pytest.mark.process


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsFactory]:
    with launch_pods(tmp_path) as factory:
        yield factory


# The bad rank closes its connections and ends later; its peers fail at once, as with gloo.
TRAIN = """
import atexit, os, signal, sys, time
round = os.environ["TORCHELASTIC_RESTART_COUNT"]

def leave(seconds):
    open(f"left-{round}", "w").close()
    time.sleep(seconds)

if os.environ["RANK"] == "BAD":
    FAULT
while not os.path.exists(f"left-{round}"):
    time.sleep(0.02)
PEER
"""
LOST = 'raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")'
WAITS = "time.sleep(600)"
AFTER_EXCEPTION = "atexit.register(leave, 600); raise RuntimeError('vocab entry')"
IN_FINALLY = """
    try:
        raise RuntimeError("vocab entry")
    finally:
        leave(4)
"""
EXITS = "atexit.register(leave, 600); sys.exit(3)"
IGNORES_SIGNALS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + AFTER_EXCEPTION
CRASHES = "leave(4); os.kill(os.getpid(), signal.SIGSEGV)"
CONFIG = {"restarts_without_progress": 1}


def run(pods: PodsFactory, fault: str, bad: int, peer: str = LOST, nodes: int = 2, nproc: int = 1) -> list[PodEnd]:
    script = TRAIN.replace("BAD", str(bad)).replace("FAULT", fault).replace("PEER", peer)
    return pods("train.py", script=script, nodes=nodes, nproc=nproc, max_restarts=2, config=CONFIG).run()


@pytest.mark.parametrize(
    ("fault", "bad", "nodes", "nproc", "message"),
    [
        (AFTER_EXCEPTION, 0, 2, 1, "RuntimeError: vocab entry"),
        (EXITS, 0, 2, 2, "worker exited with code 3"),
        (CRASHES, 2, 3, 1, "worker killed by SIGSEGV"),
        (CRASHES, 1, 1, 2, "worker killed by SIGSEGV"),
        pytest.param(IN_FINALLY, 3, 2, 2, "RuntimeError: vocab entry", marks=pytest.mark.nightly),
        pytest.param(IGNORES_SIGNALS, 1, 2, 1, "RuntimeError: vocab entry", marks=pytest.mark.nightly),
    ],
    ids=["exception", "exit code", "crash", "crash in one pod", "finally", "own signal handler"],
)
def test_slow_end_of_failed_rank_is_counted_as_root_cause(
    pods: PodsFactory, fault: str, bad: int, nodes: int, nproc: int, message: str
) -> None:
    ended = run(pods, fault, bad, nodes=nodes, nproc=nproc)
    cause = ended.pop(bad // nproc)
    assert (cause.message["message"], cause.message["rank"]) == (message, bad), cause.log
    assert (cause.message["repeated"], cause.message["restarts"], cause.code) == (True, 1, 81)
    assert "restart 1: " + message in cause.log
    assert [(peer.message["secondary"], peer.message["restarts"]) for peer in ended] == [(True, 1)] * len(ended)


@pytest.mark.nightly
@pytest.mark.parametrize(("peer", "nodes"), [(WAITS, 2), (WAITS, 1)])
def test_rank_that_never_ends_after_exception_is_ended(pods: PodsFactory, peer: str, nodes: int) -> None:
    script = TRAIN.replace("BAD", "0").replace("FAULT", AFTER_EXCEPTION).replace("PEER", peer)
    env = {"DDP_GRACE_SECONDS": "1"}
    job = pods("train.py", script=script, nodes=nodes, max_restarts=2, config=CONFIG, env=env)
    job.start()
    cause = job.wait(0)
    assert (cause.message["message"], cause.message["restarts"]) == ("RuntimeError: vocab entry", 1), cause.log


@pytest.mark.nightly
def test_restarts_without_known_cause_are_limited(pods: PodsFactory) -> None:
    ended = run(pods, "leave(600)", 0)
    assert [pod.code for pod in ended] == [86, 86], ended[0].log
    assert [pod.message["restarts"] for pod in ended] == [1, 1]
    assert ended[0].log.count("no pod has reported why") >= 1
    assert "in leave" in ended[0].log, "the stacks of ranks that have not failed"
