"""What the launcher teaches torchrun's agent. The only module that touches torchrun's private parts."""

from __future__ import annotations

import importlib
import os
import signal
import time
from typing import Any, Callable, Iterable

from .clock import AwakeClock
from .contract import EXIT_PREEMPTED, EXIT_USER_ERROR, STALL_REPORT_FILE, STOPPING_FILE
from .failure import blame_early_ends, examine
from .files import log
from .pod import Pod
from .preflight import PreflightError, run_preflight
from .processes import STOPPED_STATES, process_state
from .rendezvous_quorum import Gathering, Heartbeats
from .rendezvous_store import find_early_ends, have_all_ended
from .stall import StallBoard

_SECONDS_WITHOUT_STORE = 5.0
_SECONDS_FOR_ENDS = 5.0  # that pods which have trained together may end one after another
Tell = Callable[["dict[str, Any]"], None]


def adapt_torchrun(pod: Pod, tell: Tell, is_repeated: Callable[[dict[str, Any]], bool]) -> Callable[[], None]:
    """Teach the agent what torchrun has no flag for. Where torch has changed, the rest of the launcher still works.

    It tells what it does; it does not restart what a restart cannot help, nor what fails the same way again; it gives
    workers their grace time; it lets workers end by themselves for a while when the store is gone, so that their own
    exit codes say why. In an elastic job it restarts for free when other pods come and go, and knows whom to wait for.

    Returns a function that takes this pod out of the rendezvous, so that the others need not wait for its heartbeats
    to end.
    """
    server = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    rounds: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    agent, handler = server.LocalElasticAgent, rounds.DynamicRendezvousHandler

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            log(f"this torch has no {owner.__name__}.{name}: some details will not be reported")
        else:
            setattr(owner, name, lambda self, *args, **kwargs: around(inner, self, *args, **kwargs))

    gate = SignalGate(processes)
    board = StallBoard(os.path.join(pod.runtime, STALL_REPORT_FILE), max(0.5, min(5.0, pod.nodes / 100)))
    gathering = Gathering(pod.nodes)
    meeting: list[Any] = []  # the rendezvous handler, once it is known

    def rendezvous(inner: Any, self: Any, *args: Any) -> Any:
        tell({"phase": "Rendezvous"})
        if pod.elastic and args:
            meeting[:] = [args[0].spec.rdzv_handler]
            gathering.begin(meeting[0]._state_holder.state)
        return inner(self, *args)

    def join(inner: Any, self: Any, ctx: Any, deadline: float) -> Any:
        action, actions = inner(self, ctx, deadline), rounds._Action
        if action not in (actions.SYNC, actions.KEEP_ALIVE, actions.MARK_RENDEZVOUS_COMPLETE):
            return action
        wish = gathering.decide(ctx.state, ctx.node, ctx.settings.min_nodes, time.monotonic())
        if wish is None:
            return action
        if wish:
            return actions.MARK_RENDEZVOUS_COMPLETE
        return actions.KEEP_ALIVE if rounds._should_keep_alive(ctx) else actions.SYNC

    def leave() -> None:
        for handler in meeting:
            try:
                handler._op_executor.run(rounds._RendezvousExitOp(), time.monotonic() + 5)
            except Exception as error:
                log(f"the others will notice that this pod is gone by its silence: {error}")

    def start(inner: Any, self: Any, *args: Any) -> Any:
        if pod.preflight is not None and args and is_first_round(args[0]):
            ranks = [(one.local_rank, one.global_rank, one.world_size) for one in args[0].workers]
            report = run_preflight(importlib.import_module("torch"), pod, pod.preflight, ranks)
            tell({"preflight": report})
            if report["problems"] and pod.preflight.fail:
                raise PreflightError("; ".join(f"{check}: {text}" for check, text in report["problems"].items()))
        with gate:
            started = inner(self, *args)
        tell({"phase": "Running"})
        return started

    def restart(inner: Any, self: Any, *args: Any) -> Any:
        tell({"restart": True})
        return inner(self, *args)

    def monitor(inner: Any, self: Any, *args: Any) -> Any:
        result = inner(self, *args)
        stalls = board.exchange(self, time.monotonic()) if pod.meets_others else None
        if stalls is not None:
            tell({"board": stalls})
        failures = [examine(pod, read_failure(rank, item)) for rank, item in (result.failures or {}).items()]
        if failures and not pod.elastic:
            ranks, pods = find_early_ends(self)
            failures = [blame_early_ends(failure, ranks, pods) for failure in failures]
            if pods:
                self._remaining_restarts = 0  # they do not come to another rendezvous: it would only time out
        stopping = os.path.exists(os.path.join(pod.runtime, STOPPING_FILE))
        outcomes = [failure["outcome"] for failure in failures]
        blameless = all(outcome.secondary or outcome.exit_code == EXIT_PREEMPTED for outcome in outcomes)
        free = bool(failures) and pod.elastic and blameless and not stopping and gathering.spend()
        repeated = bool(failures) and is_repeated({"failures": failures, "free": free})
        if free:
            self._remaining_restarts += 1
        elif repeated or any(failure["outcome"].exit_code in (EXIT_USER_ERROR, EXIT_PREEMPTED) for failure in failures):
            self._remaining_restarts = 0
        return result

    def close(inner: Any, self: Any, death_sig: Any = None, timeout: float = 30) -> Any:
        saves = os.path.exists(os.path.join(pod.runtime, STOPPING_FILE)) or pod.elastic
        release_stopped(self.pids().values(), saves=saves)
        return inner(self, death_sig, pod.grace if saves else timeout)

    lost: list[tuple[AwakeClock, Exception]] = []

    def count_waiting(inner: Any, self: Any) -> Any:
        if not lost:
            try:
                return inner(self)
            except Exception as error:
                lost.append((AwakeClock(1.0, time.monotonic()), error))
        clock, problem = lost[0]
        if clock.tick(time.monotonic()) > _SECONDS_WITHOUT_STORE:
            raise problem
        return 0

    def wait_for_ends(inner: Any, self: Any) -> Any:
        if have_all_ended(self, _SECONDS_FOR_ENDS):
            return inner(self)
        log("rank 0 has succeeded, which is enough by spec.successPolicy: the other pods are not waited for")
        return None

    def identify(inner: Any, self: Any, local_addr: str | None = None) -> Any:
        node = inner(self, local_addr)
        # An agent that takes a dead one's place is the same node: the others need not wait for its heartbeats to end.
        return type(node)(node.addr, 0, 0) if local_addr else node

    wrap(rounds._NodeDescGenerator, "generate", identify)
    wrap(agent, "_rendezvous", rendezvous)
    wrap(agent, "_start_workers", start)
    wrap(agent, "_restart_workers", restart)
    wrap(agent, "_monitor_workers", monitor)
    wrap(processes.PContext, "close", close)
    wrap(handler, "num_nodes_waiting", count_waiting)
    if pod.success_policy == "RankZero" and pod.node == 0:
        wrap(agent, "_exit_barrier", wait_for_ends)  # torchrun would wait there for 300 s
    if pod.elastic:
        known: list[Heartbeats] = []
        wrap(rounds._RendezvousJoinOp, "__call__", join)
        wrap(rounds._BackendRendezvousStateHolder, "_sanitize", lambda inner, self: remove_the_dead(inner, self, known))
    # torchrun looks for the others once a second, whatever their number: most of a small job's rendezvous is sleep.
    pause = min(1.0, pod.nodes / 100)
    try:
        rounds._BackendRendezvousStateHolder.__init__.__defaults__ = (pause,)
        slow = rounds._delay
        rounds._delay = lambda seconds: slow(pause if seconds == 1 else (0, min(0.3, pause)))
    except AttributeError:
        pass
    return leave


def release_stopped(pids: Iterable[int], *, saves: bool) -> None:
    """Let no stopped worker hold up its agent: SIGTERM would not reach it before the whole wait for it is over.

    ``saves``: it goes on, to save as the others do. Otherwise what it has is lost anyway.
    """
    for pid in pids:
        if process_state(pid) in STOPPED_STATES:
            try:
                os.kill(pid, signal.SIGCONT if saves else signal.SIGKILL)
            except OSError:
                pass


class SignalGate:
    """Holds back a signal to the agent while it starts the workers.

    torchrun answers a signal by an exception wherever it stands. Raised between the start of a worker and the note of
    it, that worker would be killed without its grace time: nobody knows that it is there.
    """

    def __init__(self, processes: Any) -> None:
        self._answer = getattr(processes, "_terminate_process_handler", None)
        self._closed = False
        self._held: list[int] = []
        if self._answer is not None:
            processes._terminate_process_handler = self._on_signal

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._closed:
            self._held.append(number)
        elif self._answer is not None:
            self._answer(number, frame)

    def __enter__(self) -> None:
        self._closed = True

    def __exit__(self, *about: object) -> None:
        self._closed = False
        if self._held and self._answer is not None:
            self._answer(self._held.pop(0), None)


def remove_the_dead(inner: Callable[[Any], None], holder: Any, known: list[Heartbeats]) -> None:
    """Let torchrun's holder of the rendezvous' state remove dead pods from it, those that may live apart."""
    if not known:
        settings = holder._settings
        patience = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
        known.append(Heartbeats(patience, time.monotonic()))
    beats = holder._state.last_heartbeats
    spared = {node: beats[node] for node in known[0].spare(beats, time.monotonic())}
    beats.update((node, beat.replace(year=9999, month=1, day=1)) for node, beat in spared.items())
    try:
        inner(holder)
    finally:
        beats.update(spared)


def is_first_round(worker_group: Any) -> bool:
    """Tell whether all pods meet for the first time; in a later round some are past their preflight already."""
    try:
        return bool(worker_group.spec.rdzv_handler._state_holder.state.round == 0)
    except AttributeError:
        return True  # the static rendezvous has one round


def read_failure(rank: int, failure: Any) -> dict[str, Any]:
    """Return torchrun's ProcessFailure as JSON; scripts under @record have a message with a traceback in it."""
    text, trace = failure.message, ""
    if isinstance(text, dict):
        trace = str(text.get("extraInfo", {}).get("py_callstack", ""))
        text = str(text.get("message", ""))
    elif failure.error_file_data.get("message") == "<NONE>":
        text = ""  # torchrun's own advice to use @record
    about = {"rank": rank, "localRank": failure.local_rank, "exitCode": failure.exitcode, "time": failure.timestamp}
    return {**about, "type": "", "message": text, "traceback": trace}
