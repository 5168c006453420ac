"""What the launcher teaches torchrun's agent. The only module that touches private parts of torch."""

import importlib
import math
import os
import signal
import time
from contextlib import suppress
from typing import Any, Callable, Iterable, Optional

from ...contract.names import EXIT_PREEMPTED, RUN_STEP_FILE, STALL_REPORT_FILE, STOPPING_FILE
from ..failures.rules import WorkerEnd
from ..failures.worker_failure import EndedPeers, examine_worker
from ..files import log
from ..network.preflight import PreflightError, find_fatal, run_preflight
from ..pod import Pod
from ..processes import STOPPED_STATES, kill, process_state
from ..watchdog.stall import SharedStallState
from .agreement import RestartCount, RunStep, SharedSnapshot
from .fixed_group import FixedGroup, GroupClosed
from .fork_server import RankForker
from .loopback import ProgramStore
from .rendezvous import AwakeClock, Heartbeats, RendezvousQuorum, Seats, query_store

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SECONDS_WITHOUT_STORE = 5.0
_SECONDS_FOR_ENDS = 5.0  # that pods which have trained together may end one after another
_LAST_BARRIER = "torchelastic/agent/terminal_state/num_members"  # torchrun's key, in the store of a round
_ELASTIC = "torch.distributed.elastic."
_AGENT = f"{_ELASTIC}agent.server.local_elastic_agent:LocalElasticAgent"
_PROCESSES = f"{_ELASTIC}multiprocessing.api"
_RENDEZVOUS = f"{_ELASTIC}rendezvous.dynamic_rendezvous"
_BACKEND = f"{_ELASTIC}rendezvous.c10d_rendezvous_backend:C10dRendezvousBackend"
# By the module and the name in it: members of a module or a class, or attributes that a class gives its objects.
_PRIVATE_PARTS = {
    f"{_AGENT}": ("_rendezvous", "_start_workers", "_restart_workers", "_monitor_workers", "_exit_barrier"),
    f"{_AGENT}()": ("_store", "_worker_group", "_remaining_restarts", "_pcontext"),
    f"{_PROCESSES}": ("_terminate_process_handler",),
    f"{_PROCESSES}:PContext": ("close", "pids"),
    f"{_PROCESSES}:SubprocessHandler": ("_popen",),
    f"{_PROCESSES}:SubprocessHandler()": ("_stdout", "_stderr"),
    f"{_RENDEZVOUS}": ("_delay", "_should_keep_alive", "_RendezvousExitOp", "_RendezvousCloseOp", "_RendezvousState"),
    f"{_RENDEZVOUS}:_Action": ("SYNC", "KEEP_ALIVE", "MARK_RENDEZVOUS_COMPLETE"),
    f"{_RENDEZVOUS}:_NodeDescGenerator": ("generate",),
    f"{_RENDEZVOUS}:_RendezvousJoinOp": ("__call__",),
    f"{_RENDEZVOUS}:_BackendRendezvousStateHolder": ("_sanitize",),
    f"{_RENDEZVOUS}:_BackendRendezvousStateHolder()": ("_state", "_settings", "_backend"),
    f"{_RENDEZVOUS}:_DistributedRendezvousOpExecutor": ("run",),
    f"{_RENDEZVOUS}:_DistributedRendezvousOpExecutor()": ("_node", "_state_holder"),
    f"{_BACKEND}": ("_call_store",),
    f"{_BACKEND}()": ("_key",),
    f"{_RENDEZVOUS}:DynamicRendezvousHandler": ("num_nodes_waiting",),
    f"{_RENDEZVOUS}:DynamicRendezvousHandler()": ("_state_holder", "_op_executor"),
}
Report = Callable[["dict[str, Any]"], None]


def find_missing_parts() -> list[str]:
    """Return the private parts that this torch does not have."""
    missing = []
    for owner, names in _PRIVATE_PARTS.items():
        module, _, name = owner.partition(":")
        found: Any = importlib.import_module(module)
        if name:
            found = getattr(found, name.rstrip("()"), None)
        if owner.endswith("()"):
            makers = [kind.__dict__.get("__init__") for kind in getattr(found, "__mro__", ())]
            known = {word for maker in makers if hasattr(maker, "__code__") for word in maker.__code__.co_names}
        else:
            known = set(dir(found))
        missing += [f"{owner.rpartition('.')[2]}.{name}" for name in names if name not in known]
    return missing


def log_errors_only(torch: Any) -> None:
    """Let C++ of this process log errors only, unless the pod's environment says what is logged."""
    if os.environ.get(_CPP_LOG_LEVEL):
        return
    import ctypes

    os.environ[_CPP_LOG_LEVEL] = "ERROR"
    with suppress(OSError, AttributeError):  # where the symbol is another one the log is longer
        ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))._ZN3c1011initLoggingEv()
    del os.environ[_CPP_LOG_LEVEL]


def adapt_torchrun(
    pod: Pod,
    report: Report,
    may_restart: Callable[[dict[str, Any]], bool],
    forker: Optional[RankForker],
    count: int = 0,
    synchronize: Callable[[Optional[str]], str] = lambda known: "",
) -> Callable[[], None]:
    """Teach the agent what torchrun has no flag for, or nothing where this torch lacks a part that this needs.

    ``report`` sends an event to the launcher; ``may_restart`` sends failures, and returns whether a restart follows;
    ``forker`` forks the ranks, None: they start in fresh interpreters; ``count``: how often the launcher has restarted
    the workers; ``synchronize`` is a ``SharedSnapshot``'s. Returns a function that takes this pod out of the
    rendezvous. Raises: RuntimeError, for spares where it lacks one.
    """
    missing = find_missing_parts()
    if not missing:
        patches = TorchrunPatches(pod, report, may_restart, forker, count, synchronize)
        patches.apply()
        return patches.leave
    lack = f"torch {importlib.import_module('torch').__version__} lacks {', '.join(missing)}: "
    if pod.spares:
        raise RuntimeError(f"{lack}with torchrun as it is a spare could take pod 0's place; remove spec.spares")
    log(
        f"{lack}torchrun runs as it is. "
        "Training works; there are no warm start, no preflight, no phases and no restarts in the same pods by the "
        "kind of a failure, workers have torchrun's 30 s to save, and an elastic job meets by torchrun's own timeouts"
    )
    report({"phase": "Running"})
    return lambda: None


class TorchrunPatches:
    """The agent reports what it does, and does not restart what a restart cannot help or what fails the same way again.

    Workers get their grace time, and time to end by themselves when the store is gone, so that their own exit codes say
    why. In an elastic job it restarts for free when other pods come and go, and knows whom to wait for.
    """

    def __init__(
        self,
        pod: Pod,
        report: Report,
        may_restart: Callable[[dict[str, Any]], bool],
        forker: Optional[RankForker],
        count: int = 0,
        synchronize: Callable[[Optional[str]], str] = lambda known: "",
    ) -> None:
        self._pod, self._report, self._may_restart, self._forker = pod, report, may_restart, forker
        self._checkpoints = SharedSnapshot(pod, synchronize)
        self._processes: Any = importlib.import_module(_PROCESSES)
        self._rounds: Any = importlib.import_module(_RENDEZVOUS)
        self._gate = SignalGate(self._processes)
        self._board = SharedStallState(
            os.path.join(pod.runtime, STALL_REPORT_FILE), max(0.5, min(5.0, pod.nodes / 100))
        )
        self._run_step = RunStep(os.path.join(pod.runtime, RUN_STEP_FILE))
        # torchrun looks for the others once a second, whatever their number: most of a small job's rendezvous is sleep.
        self._pause = min(1.0, pod.nodes / 100)
        self._group = FixedGroup(pod, self._pause)
        self._quorum = RendezvousQuorum(pod.nodes)
        self._seats = Seats(pod)
        self._heartbeats: Optional[Heartbeats] = None
        self._handler: Any = None  # of an elastic job's rendezvous, once it is known
        self._lost_store: Optional[tuple[AwakeClock, Exception]] = None
        self._restarts = 0
        self._failed = False
        self._count = RestartCount(count)
        self._program_store = ProgramStore()

    def apply(self) -> None:
        """Put this object's methods around torchrun's."""
        module, _, name = _AGENT.partition(":")
        agent, rounds, pod = getattr(importlib.import_module(module), name), self._rounds, self._pod
        _wrap(rounds._NodeDescGenerator, "generate", self._identify)
        _wrap(agent, "_rendezvous", self._meet)
        _wrap(agent, "_start_workers", self._start)
        _wrap(agent, "_restart_workers", self._restart)
        _wrap(agent, "_monitor_workers", self._monitor)
        _wrap(self._processes.PContext, "close", self._close)
        if self._forker is not None or pod.program:
            _wrap(self._processes.SubprocessHandler, "_popen", self._open)
        _wrap(rounds.DynamicRendezvousHandler, "num_nodes_waiting", self._count_waiting)
        if pod.success_policy == "RankZero" and pod.node == 0:
            _wrap(agent, "_exit_barrier", self._wait_for_ends)  # torchrun would wait there for 300 s
        if pod.spares:
            _wrap(rounds._RendezvousJoinOp, "__call__", self._take_seat)
        if pod.elastic:
            _wrap(rounds._RendezvousJoinOp, "__call__", self._join)
        if pod.regroups:
            _wrap(rounds._BackendRendezvousStateHolder, "_sanitize", self._remove_dead_nodes)
        elif self._has_fixed_group:
            _wrap(rounds._DistributedRendezvousOpExecutor, "run", self._meet_fixed_group)
        # For an event that nobody records each of torchrun's steps looks up the source of every frame, twice.
        rounds.get_method_name = lambda *_: ""
        rounds._BackendRendezvousStateHolder.__init__.__defaults__ = (self._pause,)
        delay = rounds._delay
        rounds._delay = lambda seconds: delay(self._pause if seconds == 1 else (0, min(0.3, self._pause)))

    def leave(self) -> None:
        """Take this pod out of the rendezvous, so that the others need not wait for its heartbeats to end."""
        if self._handler is None:
            return
        try:
            self._handler._op_executor.run(self._rounds._RendezvousExitOp(), time.monotonic() + 5)
        except Exception as error:
            log(f"could not leave the rendezvous, so the others wait for missing heartbeats: {error}")

    @property
    def _is_stopping(self) -> bool:
        return os.path.exists(os.path.join(self._pod.runtime, STOPPING_FILE))

    # -- the agent

    def _meet(self, inner: Any, agent: Any, *args: Any) -> Any:
        self._report({"phase": "Rendezvous"})
        if self._pod.regroups and args:
            self._handler = args[0].spec.rdzv_handler
            self._quorum.start_round(self._handler._state_holder.state)
            self._seats.note(self._handler._state_holder.state)
        return inner(agent, *args)

    def _start(self, inner: Any, agent: Any, *args: Any) -> Any:
        plan = self._pod.preflight
        if plan is not None and args and _is_first_round(args[0]):
            ranks = [(one.local_rank, one.global_rank, one.world_size) for one in args[0].workers]
            report = run_preflight(importlib.import_module("torch"), self._pod, plan, ranks)
            self._report({"preflight": report})
            fatal = find_fatal(report, plan)
            if fatal:
                raise PreflightError(fatal, report)
        self._checkpoints.share(agent._store)
        with self._gate:
            started = inner(agent, *args)
        self._report({"phase": "Running"})
        if self._pod.is_multi_node:
            self._count.start_round(agent._store, time.monotonic())
        return started

    def _restart(self, inner: Any, agent: Any, *args: Any) -> Any:
        if not self._failed and any(find_exit_codes(agent).values()):
            return None  # other pods' restart was heard of before this pod's own failure, which is to be reported first
        self._learn_count()
        self._report({"restart": True})
        self._restarts += 1
        self._count.count += 1
        # What TORCHELASTIC_RESTART_COUNT is computed from: torchrun counts failures of its own ranks alone.
        agent._remaining_restarts = agent._worker_group.spec.max_restarts - self._restarts
        return inner(agent, *args)

    def _learn_count(self, now: float = math.inf) -> None:
        if self._count.learn(now):
            self._report({"count": self._count.count})

    def _monitor(self, inner: Any, agent: Any, *args: Any) -> Any:
        pod, result = self._pod, inner(agent, *args)
        if pod.is_multi_node:
            board = self._board.exchange(agent._store, agent._worker_group.group_world_size, time.monotonic())
            if board is not None:
                self._report({"board": board})
            if pod.node == 0:
                self._run_step.post(agent._store, time.monotonic())
            self._learn_count(time.monotonic())
        process_failures = result.failures or {}
        ended_peers = find_ended_peers(agent) if process_failures and not pod.elastic else EndedPeers()
        failures = [
            examine_worker(pod, read_process_failure(rank, failure), ended_peers)
            for rank, failure in process_failures.items()
        ]
        self._failed = bool(failures)
        not_counted = all(failure.secondary or failure.container_exit_code == EXIT_PREEMPTED for failure in failures)
        may_be_free = bool(failures) and pod.awaits_peers and not_counted and not self._is_stopping
        free = may_be_free and self._quorum.take_free_restart()
        if failures:
            step = self._run_step.read(agent._store) if pod.node and pod.is_multi_node else None
            messages = [failure.to_json() for failure in failures]
            again = self._may_restart({"failures": messages, "free": free, "step": step})
            # Pods that have ended do not join another rendezvous round: it would only time out.
            agent._remaining_restarts = int(again and not ended_peers.pods)
        return result

    def _open(self, inner: Any, handler: Any, args: Any, env: dict[str, str]) -> Any:
        env = self._program_store.share(env) if self._pod.program else env
        forked = self._forker and self._forker.fork(args, env, (handler._stdout, handler._stderr))
        return forked or inner(handler, args, env)

    def _close(self, inner: Any, context: Any, death_sig: Any = None, timeout: float = 30) -> Any:
        saves = self._is_stopping or self._pod.elastic
        release_stopped(context.pids().values(), saves=saves)
        return inner(context, death_sig, self._pod.grace if saves else timeout)

    def _wait_for_ends(self, inner: Any, agent: Any) -> Any:
        if have_all_ended(agent, _SECONDS_FOR_ENDS):
            return inner(agent)
        log("rank 0 has succeeded, which is enough by spec.successPolicy: the other pods are not waited for")
        return None

    # -- the rendezvous

    def _count_waiting(self, inner: Any, handler: Any) -> Any:
        if self._lost_store is None:
            try:
                return self._ask_fixed_group(handler) if self._has_fixed_group else inner(handler)
            except Exception as error:
                self._lost_store = AwakeClock(1.0, time.monotonic()), error
        clock, problem = self._lost_store
        if clock.tick(time.monotonic()) > _SECONDS_WITHOUT_STORE:
            raise problem
        return 0

    @property
    def _has_fixed_group(self) -> bool:
        if self._pod.regroups or not self._pod.is_multi_node:
            return False
        return hasattr(importlib.import_module("torch.distributed").TCPStore, "check")  # torch 2.2 has none

    def _ask_fixed_group(self, handler: Any) -> int:
        backend = handler._state_holder._backend
        return int(self._group.is_another_round_wanted(backend._call_store, backend._key, time.monotonic()))

    def _meet_fixed_group(self, inner: Any, executor: Any, operation: Any, deadline: float, *args: Any) -> None:
        """Do what torchrun's operation is for, without the document that it works on."""
        rounds, holder = self._rounds, executor._state_holder
        call, run = holder._backend._call_store, holder._backend._key
        if isinstance(operation, rounds._RendezvousCloseOp):
            self._group.close(call, run)
        if not isinstance(operation, rounds._RendezvousJoinOp):
            return  # there is nothing to leave, and no heartbeat to send
        try:
            number, addresses = self._group.meet(call, run, executor._node.addr, deadline)
        except GroupClosed:
            raise rounds.RendezvousClosedError from None
        except TimeoutError:
            raise rounds.RendezvousTimeoutError from None
        holder._state = rounds._RendezvousState()
        holder._state.round, holder._state.complete = number, True
        nodes = [type(executor._node)(address, 0, 0) for address in addresses]
        holder._state.participants = {node: rank for rank, node in enumerate(sorted(nodes))}

    def _identify(self, inner: Any, generator: Any, local_addr: Optional[str] = None) -> Any:
        node = inner(generator, local_addr)
        # An agent that takes a dead one's place is the same node: the others need not wait for its heartbeats to end.
        return type(node)(node.addr, 0, 0) if local_addr else node

    def _join(self, inner: Any, operation: Any, ctx: Any, deadline: float) -> Any:
        action, actions = inner(operation, ctx, deadline), self._rounds._Action
        if action not in (actions.SYNC, actions.KEEP_ALIVE, actions.MARK_RENDEZVOUS_COMPLETE):
            return action
        complete = self._quorum.decide(ctx.state, ctx.node, ctx.settings.min_nodes, time.monotonic())
        if complete is None:
            return action
        if complete:
            return actions.MARK_RENDEZVOUS_COMPLETE
        return self._keep_waiting(ctx)

    def _take_seat(self, inner: Any, operation: Any, ctx: Any, deadline: float) -> Any:
        if ctx.node in ctx.state.participants or not self._seats.waits(ctx.state, ctx.node, time.monotonic()):
            return inner(operation, ctx, self._seats.deadline(deadline))
        # Not among torchrun's own that wait: the others would start their workers again for it.
        return self._keep_waiting(ctx)

    def _keep_waiting(self, ctx: Any) -> Any:
        actions = self._rounds._Action
        return actions.KEEP_ALIVE if self._rounds._should_keep_alive(ctx) else actions.SYNC

    def _remove_dead_nodes(self, inner: Any, holder: Any) -> None:
        """Let torchrun remove dead nodes from the rendezvous' state, but none that may live."""
        if self._heartbeats is None:
            settings = holder._settings
            patience = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
            self._heartbeats = Heartbeats(patience, time.monotonic())
        beats = holder._state.last_heartbeats
        live = {node: beats[node] for node in self._heartbeats.live_nodes(beats, time.monotonic())}
        beats.update((node, beat.replace(year=9999, month=1, day=1)) for node, beat in live.items())
        try:
            inner(holder)
        finally:
            beats.update(live)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by one that gets it as its first argument."""
    inner = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **kwargs: around(inner, self, *args, **kwargs))


def _is_first_round(worker_group: Any) -> bool:
    """Tell whether all pods meet for the first time; in a later round some are past their preflight already."""
    holder = getattr(worker_group.spec.rdzv_handler, "_state_holder", None)
    return holder is None or bool(holder.state.round == 0)  # the static rendezvous has one round


def find_ended_peers(agent: Any) -> EndedPeers:
    """Return the ranks of this pod that have ended with exit code 0, and the number of other pods that have.

    A pod whose ranks have all ended so waits at torchrun's last barrier, which counts the pods in the store.
    """
    waiting_pods = query_store(lambda: int(agent._store.add(_LAST_BARRIER, 0)))
    exit_codes = find_exit_codes(agent)
    workers = agent._worker_group.workers
    ranks = sorted(worker.global_rank for worker in workers if exit_codes.get(worker.local_rank) == 0)
    return EndedPeers(ranks, sum(waiting_pods))


def find_exit_codes(agent: Any) -> dict[int, Optional[int]]:
    """Return the exit codes of the pod's workers by local rank; None: it runs."""
    running = getattr(agent._pcontext, "subprocess_handlers", {})
    return {rank: one.proc.poll() for rank, one in running.items()}


def have_all_ended(agent: Any, patience: float) -> bool:
    """Tell whether the ranks of all other pods have ended too, or do so within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    try:
        while agent._store.add(_LAST_BARRIER, 0) < agent._worker_group.group_world_size - 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
    except Exception:
        return False  # there is no store any more
    return True


def read_process_failure(rank: int, failure: Any) -> WorkerEnd:
    """Return torchrun's ProcessFailure; of a script under @record its message contains a traceback."""
    message = failure.message
    traceback = ""
    if isinstance(message, dict):
        traceback = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = str(message.get("message", ""))
    elif failure.error_file_data.get("message") == "<NONE>":
        message = ""  # torchrun's own advice to use @record
    return WorkerEnd(
        failure.exitcode,
        message=message,
        traceback=traceback,
        time=failure.timestamp,
        rank=rank,
        local_rank=failure.local_rank,
    )


def release_stopped(pids: Iterable[int], *, saves: bool) -> None:
    """Let no stopped worker hold up its agent: SIGTERM would not reach it before the whole wait for it is over.

    ``saves``: it goes on, to save as the others do. Otherwise what it has is lost anyway.
    """
    for pid in pids:
        if process_state(pid) in STOPPED_STATES:
            kill(pid, signal.SIGCONT if saves else signal.SIGKILL)


class SignalGate:
    """Holds back a signal to the agent while it starts the workers.

    torchrun turns a signal into an exception wherever it stands. Raised between the start of a worker and the note of
    it, that worker would be killed without its grace period, as it is in no list yet.
    """

    def __init__(self, processes: Any) -> None:
        self._handle = processes._terminate_process_handler
        self._closed = False
        self._held: list[int] = []
        processes._terminate_process_handler = self._on_signal

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._closed:
            self._held.append(number)
        else:
            self._handle(number, frame)

    def __enter__(self) -> None:
        self._closed = True

    def __exit__(self, *about: object) -> None:
        self._closed = False
        if self._held:
            self._handle(self._held.pop(0), None)
