"""What a rank does instead of a step, in words."""

from ...base.pod import WorkerRecord
from ...contract.processes import STOPPED_STATES
from .collectives import RankCollectives
from .stacks import Stack
from .stall import ACTIVITY_LIMIT, RankActivity, RankStall


def describe_activity(
    stall: RankStall, worker: WorkerRecord, stack: Stack | None, collectives: RankCollectives, process: str
) -> RankActivity:
    """Return what a worker does instead of a step. ``process``: the state of its process."""
    is_idle = worker.local_rank in stall.idle
    if process in STOPPED_STATES:
        state = "Stopped"
        what = f"the process of rank {worker.rank} is stopped (SIGSTOP)"
    elif stack is None or not stack.frames:
        state = "Waiting" if stall.certain or is_idle else "Busy"
        what = f"rank {worker.rank} {'uses no CPU' if is_idle else 'shows no Python stack'}"
    elif stack.is_in_torch or (stack.waits_for_peers and not collectives.are_over):
        state = "Waiting"
        what = f"rank {worker.rank} waits for other ranks in {stack.place}"
    else:
        state = "Behind" if stall.certain or is_idle else "Busy"
        what = f"rank {worker.rank} is in {stack.place}"
    what += _describe_collective(state, collectives)
    return RankActivity(worker.rank, worker.local_rank, state, what[:ACTIVITY_LIMIT])


def _describe_collective(state: str, collectives: RankCollectives) -> str:
    """Return the collective in which a rank waits, or the last one that it has called."""
    pending = collectives.pending
    if state == "Waiting" and pending is not None:
        return f": {pending.text}"
    return f", after {collectives.last.name}" if collectives.last is not None else ""
