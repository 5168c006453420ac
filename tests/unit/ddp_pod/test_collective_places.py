"""The ranks whose collectives did not match, after gloo has aborted one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ddp_pod.contract.failure_record import Failure
from ddp_pod.failures.collective_places import (
    RankPlace,
    add_places,
    find_lost_places,
    find_main_stack,
    find_timed_stack,
    is_wait,
    read_places,
)

LIBRARY: Final = "/venv/lib/python3.11/site-packages/torch"
REPORT: Final = f"""\
what():  op.preamble.length <= op.nbytes. 132 vs 8.
Fatal Python error: Aborted

Thread 0x00007f87bf7fe6c0 (most recent call first):
  File "/app/load.py", line 36 in prefetch

Thread 0x00007f87e8491b80 (most recent call first):
  File "{LIBRARY}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{LIBRARY}/distributed/c10d_logger.py", line 83 in wrapper
  File "/app/train.py", line 52 in main
  File "/launcher.zip/rank/worker.py", line 210 in _run_and_record

Extension modules: numpy.linalg._umath_linalg
"""
TIMED: Final = """\
step 14 loss 0.3
Timeout (0:00:08)!
Thread 0x00007f87bf7fe6c0 (most recent call first):
  File "/app/load.py", line 36 in prefetch

Thread 0x00007f87e8491b80 (most recent call first):
  File "/app/train.py", line 12 in read_shard
  File "/app/train.py", line 52 in main
  File "/launcher.zip/rank/worker.py", line 210 in _run_and_record
"""
TRACEBACK: Final = f"""\
Traceback (most recent call last):
  File "/app/train.py", line 46, in main
    loss.backward()
  File "{LIBRARY}/_tensor.py", line 623, in backward
    torch.autograd.backward(
RuntimeError: Read error [127.0.0.1]:6057: Connection reset by peer
"""
ABORTED: Final = Failure(
    rank=1,
    message="EnforceNotMet: op.preamble.length <= op.nbytes. 132 vs 8",
    traceback=find_main_stack(REPORT),
)
LOST: Final = Failure(rank=0, secondary=True, message="Connection reset by peer", traceback=TRACEBACK)


def test_places_of_both_sides_come_first() -> None:
    lost, aborted = add_places([LOST, ABORTED])
    assert aborted.message == (
        "mismatch between collectives: rank 0 was at main (train.py:46) in backward; "
        f"rank 1 was at main (train.py:52) in all_reduce ({ABORTED.message})"
    )
    assert lost == LOST


def test_rank_with_its_own_error_is_no_side() -> None:
    (aborted, _) = add_places([ABORTED, replace(LOST, secondary=False)])
    assert "rank 1 was at" in aborted.message
    assert "rank 0" not in aborted.message


def test_other_failures_and_unknown_places_change_nothing() -> None:
    others = [replace(ABORTED, message="SIGABRT"), LOST]
    assert add_places(others) == others
    unknown = [replace(ABORTED, traceback="Fatal Python error: Aborted")]
    assert add_places(unknown) == unknown


def test_stack_of_another_thread_is_not_the_main_one() -> None:
    assert "prefetch" not in find_main_stack(REPORT)
    assert find_main_stack(REPORT.replace("_run_and_record", "run")) == ""
    assert find_main_stack("step 3") == ""


def test_stack_at_a_time_limit_is_that_of_the_main_thread() -> None:
    stack = find_timed_stack(TIMED)
    assert stack.endswith('File "/app/train.py", line 12 in read_shard')
    assert not is_wait(stack)
    assert find_timed_stack(f"{TIMED}step 15 loss 0.2\n") == "", "it went on"
    assert find_timed_stack(REPORT) == ""
    peer = find_timed_stack(TIMED.replace('/app/train.py", line 12', f'{LIBRARY}/autograd/graph.py", line 12'))
    assert is_wait(peer)


# -- several pods


def test_other_side_may_be_in_another_pod() -> None:
    (place,) = find_lost_places([replace(LOST, pod_index=1), replace(ABORTED, pod_index=1)])
    assert place == RankPlace(0, 1, "main (train.py:46) in backward")
    (aborted,) = add_places([replace(ABORTED, pod_index=0)], [place])
    assert aborted.message == (
        "mismatch between collectives: rank 0 (pod 1) was at main (train.py:46) in backward; "
        f"rank 1 (pod 0) was at main (train.py:52) in all_reduce ({ABORTED.message})"
    )


def test_peers_alone_are_no_mismatch() -> None:
    assert add_places([LOST], [RankPlace(2, 1, "main (train.py:50) in barrier")]) == [LOST]


def test_different_places_come_before_equal_ones() -> None:
    peers = [RankPlace(rank, rank, "main (train.py:52) in all_reduce") for rank in range(2, 9)]
    odd = RankPlace(9, 9, "main (train.py:60) in barrier")
    (aborted,) = add_places([replace(ABORTED, pod_index=1)], [*peers, odd])
    text = aborted.message.partition(" (EnforceNotMet")[0]
    assert text.count("was at") == 4
    assert "rank 1 (pod 1)" in text
    assert text.endswith("rank 9 (pod 9) was at main (train.py:60) in barrier")


def test_malformed_places_and_those_of_the_pod_itself_are_ignored() -> None:
    records = [[1, 0, "own"], [1, 1, 1000 * "x"], [1, 1], "text", [True, 1, "x"], {"rank": 1}, None]
    assert read_places(records, 0) == [RankPlace(1, 1, 200 * "x")]
