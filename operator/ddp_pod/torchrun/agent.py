"""torchrun's agent of one pod: a subclass of torch's that reports to the launcher and restarts as the launcher decides.

It overrides methods that torch documents for subclasses, and uses public names otherwise.
"""

import dataclasses
import inspect
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from ..base.files import log
from ..base.known_failure import KnownFailure
from ..base.pod import Pod
from ..base.runtime_files import STOPPING_FILE
from ..contract.failure_record import Failure, RankEnd
from ..failures.agent_failure import AgentEnd, ArgumentError, CauseUnknownError
from ..failures.collective_places import RankPlace
from ..failures.kinds import OTHER_SIZES
from ..failures.rules import WorkerEnd
from ..failures.worker_failure import (
    EndedPeers,
    attribute_to_interruption,
    attribute_to_lost_master,
    build_early_exit,
    build_interrupted_end,
    examine_worker,
    list_error_files,
    remove_error_files,
)
from ..progress.output_ends import SECONDS_TO_KEEP, read_end
from ..rank.group_records import list_trainers
from .channel import (
    AgentRequest,
    EndsNeeded,
    PhaseEntered,
    RanksFailed,
    RanksFinished,
    Restarting,
    RoundJoined,
    Verdict,
)
from .feature_messages import FeatureSummary, GroupFindings, PeersLost
from .fork_server import RankForker
from .launcher_channel import LauncherChannel
from .part import AgentPart, LocalRank, RoundExchange, Store, log_fault
from .ranks import ForkedRanks, ForkingLogs, RankProcesses, RanksForked, handle_stop_signals, hold_stop_signals
from .rendezvous import STATIC, PodRendezvous, PodReplacedError, TrainingOver, Unfinished
from .round_state import RoundState
from .store import SignedStore, query_store

_SECONDS_TO_STOP = 30.0  # for ranks that have nothing to save, and at least for a rank to end after its exception
_SECONDS_TO_STOP_IN_VAIN = 5.0  # for ranks that wait for a lost pod, so that they cannot agree on saving
_SECONDS_TO_PRINT = 0.5  # that a rank has for its traceback, while peers wait for its end
_SECONDS_FOR_CAUSE = 20.0  # that ranks without a failure continue while peers only report that they lost one
_SECONDS_BETWEEN_READS = 0.5  # of the store, while a pod waits for such a cause
_SECONDS_FOR_PEERS = 300.0  # that a pod whose ranks have ended waits for those of its peers
_SECONDS_FOR_PEERS_OF_RANK_0 = 5.0  # the same if the success of rank 0 is enough
_SHUTDOWN_KNOWS_RESTARTS = "is_restart" in inspect.signature(LocalElasticAgent._shutdown).parameters


class PodAgent(LocalElasticAgent):
    """The agent of a pod. Without ``ForkingLogs`` torchrun starts its ranks, as interpreters.

    The launcher decides about restarts after failures. ``restarts``: of the pod's ranks by former agents; ``parts``: of
    features.
    """

    def __init__(
        self,
        pod: Pod,
        rendezvous: PodRendezvous,
        launcher: LauncherChannel,
        restarts: int,
        parts: Sequence[AgentPart],
        spec: WorkerSpec,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self._pod = pod
        self._pod_rendezvous = rendezvous
        self._launcher = launcher
        self._restarts = restarts
        self._parts = parts
        self._ranks = RankProcesses({})
        self._round_state: Any = None  # of the current round
        self._recorded: dict[int, float] = {}  # since when a running rank has an error file, by local rank
        self._cause_deadline: float | None = None  # while a rank of this pod may be the cause of lost peers
        self._peers_wait = False  # whether other pods have requested a restart of the present ranks
        self._delay = 0.0  # seconds before the next round
        self._groups: Any = None  # why the job's ranks do not train as one, as reported last
        self._interruption = ""  # of the present ranks: why they may have been asked to end
        self._has_lost_store = False  # when it was asked for an interruption
        self._has_shared_places = False  # where ranks of this pod have lost a peer
        self._siblings_deadline: float | None = None  # while ranks of an interrupted round still end
        handle_stop_signals()

    # -- start

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._launcher.report(PhaseEntered("Rendezvous"))
        rendezvous = self._pod_rendezvous
        rendezvous.restarts = self._restarts
        if self._delay:
            with suppress(RuntimeError):  # the store has ended, as the rendezvous will report
                rendezvous.request_restart(knows_cause=rendezvous.knows_cause)
            time.sleep(self._delay)
        super()._rendezvous(worker_group)
        self._groups = None
        self._interruption = ""
        self._has_lost_store = False
        self._siblings_deadline = None
        if self._round_state is not None:
            self._round_state.forget()
        self._round_state = self._join_round(rendezvous.share(), len(rendezvous.current.members))
        self._restarts = rendezvous.current.restarts
        if not self._launcher.request(RoundJoined(self._restarts, rendezvous.current.explained)):
            raise CauseUnknownError
        # torchrun computes TORCHELASTIC_RESTART_COUNT from it, and counts only failures of this pod's ranks.
        self._remaining_restarts = worker_group.spec.max_restarts - self._restarts

    def _join_round(self, store: SignedStore, pods: int) -> RoundState:
        """Return the state that the pods of the present round share, with that of features."""
        exchanges: list[RoundExchange] = []
        for part in self._parts:
            try:
                exchange = part.join_round(self._pod, store, pods)
            except Exception as error:
                log_fault(part.name, error)
                continue
            if exchange is not None:
                exchanges.append(exchange)
        return RoundState(self._pod, store, pods, exchanges)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks in the order of the pods. All pods have the same number of ranks."""
        size = spec.local_world_size
        first = group_rank * size
        total = group_world_size * size
        return [Worker(local, first + local, first + local, total, total) for local in range(size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for part in self._parts:
            self._prepare_round(part, worker_group)
        # Only now: former ranks have ended, and a file that is removed later could be that of a new rank.
        remove_error_files(self._pod)
        self._recorded = {}
        self._has_shared_places = False
        self._cause_deadline = None
        self._peers_wait = False
        with hold_stop_signals():
            try:
                self._ranks = RankProcesses(super()._start_workers(worker_group))
            except RanksForked as forked:
                self._ranks = forked.ranks
        self._launcher.report(PhaseEntered("Running"))
        return dict(self._ranks.pids)

    def _prepare_round(self, part: AgentPart, worker_group: WorkerGroup) -> None:
        """Call a feature to prepare the start of the ranks. If a pod is lost meanwhile, join the next round.

        The request to restart precedes the rendezvous: the launcher counts the restart that the next round reports.
        """
        rendezvous = self._pod_rendezvous
        while not self._call_part(part, worker_group):
            rendezvous.knows_cause = False
            self._delay = self._launcher.request(Restarting(rendezvous.is_cause_known, None))
            self._restarts += 1
            self._rendezvous(worker_group)

    def _call_part(self, part: AgentPart, worker_group: WorkerGroup) -> bool:
        try:
            return part.prepare_round(
                self._pod, _Round(self._pod_rendezvous, self._round_state, self._launcher, worker_group)
            )
        except KnownFailure:
            raise
        except Exception as error:
            if part.is_vital(self._pod):
                raise
            log_fault(part.name, error)
            return True

    # -- monitoring

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._pod.is_multi_node:
            self._report_job(self._round_state.exchange(time.monotonic()))
        exit_codes = dict(self._ranks.poll())
        ending = self._list_ending_ranks()
        self._share_lost_places(exit_codes)
        if not any(exit_codes.values()) and not ending:
            result = self._collect_result(worker_group)
            return self._await_peers(worker_group, result) if result.state == WorkerState.SUCCEEDED else result
        succeeded = [local_rank for local_rank, code in exit_codes.items() if code == 0]
        self._find_interruption()
        if self._have_agreed_to_end(exit_codes):
            if self._awaits_siblings(ending):
                return RunResult(WorkerState.HEALTHY)
        elif not ending and self._lacks_cause(exit_codes) and self._awaits_cause():
            return RunResult(WorkerState.HEALTHY)
        # Found before the ranks are stopped, which may take the whole grace period: pods that end meanwhile did not end
        # before this failure.
        ended_peers = EndedPeers() if self._pod.elastic else self._find_ended_peers(succeeded)
        self._stop_ranks(signal.SIGTERM, ending)
        result = self._collect_result(worker_group)
        self._report_failures(result, ended_peers, exit_codes)
        return result

    def _find_ended_peers(self, succeeded: Sequence[int]) -> EndedPeers:
        """Return the peers that had already ended with 0. ``succeeded``: the local ranks of this pod that had."""
        ended_pods = self._round_state.count_ended_pods()
        if not succeeded and not ended_pods:
            return EndedPeers()
        if succeeded:
            time.sleep(SECONDS_TO_KEEP)  # their last lines may not have arrived
            first = self._describe_end(succeeded)
        else:
            first = self._round_state.find_first_end()
        return EndedPeers(first, ended_pods, len(succeeded) or ended_pods)

    def _find_interruption(self) -> str:
        """Return why the ranks of all pods may have been asked to end; empty: for no reason that a pod has announced.

        Pods announce a stop or a change of the group before they stop a rank. So it is known when a rank of another pod
        ends that has agreed with the stopped one.
        """
        if not self._interruption and self._pod.is_multi_node:
            self._interruption = query_store(self._read_interruption) or ""
        return self._interruption

    def _read_interruption(self) -> str:
        try:
            return self._pod_rendezvous.find_interruption(self._round_state.read_ended_pods)
        except RuntimeError:
            self._has_lost_store = True
            return ""

    def _have_agreed_to_end(self, exit_codes: Mapping[int, int]) -> bool:
        """Return whether ranks of this pod have ended for an announced reason, rather than for a lost peer."""
        return bool(self._interruption) and not self._are_secondary(exit_codes)

    def _awaits_siblings(self, ending: Collection[int]) -> bool:
        """Return whether other ranks of this pod still save, and end without a further signal."""
        now = time.monotonic()
        if self._siblings_deadline is None:
            self._siblings_deadline = now + self._pod.grace
        return now < self._siblings_deadline and not set(self._ranks.list_running()) <= set(ending)

    def _await_peers(self, worker_group: WorkerGroup, result: RunResult) -> RunResult:
        """Wait for the other pods once all ranks of this one have exited with 0.

        A script may leave its loop at a stop request and end with 0. The training continues, so the ranks restart.
        """
        self._launcher.report(RanksFinished())
        local_ranks = [worker.local_rank for worker in worker_group.workers]
        rank_0_is_enough = self._pod.success_policy == "RankZero" and self._pod.node == 0
        patience = _SECONDS_FOR_PEERS_OF_RANK_0 if rank_0_is_enough else _SECONDS_FOR_PEERS
        has_succeeded = self._round_state.wait_for_ended_pods(
            patience, self._is_unfinished, lambda: self._describe_end(local_ranks)
        )
        if has_succeeded or not self._interruption:
            if not has_succeeded and rank_0_is_enough:
                log("rank 0 has succeeded, which is enough by spec.successPolicy: the other pods are not waited for")
            return result
        failure = None if rank_0_is_enough or self._pod.elastic else self._find_early_exit(local_ranks)
        if failure is None:
            first_rank = worker_group.workers[0].global_rank
            failure = build_interrupted_end(self._pod, first_rank, self._interruption)
        self._request_verdict([failure], EndedPeers())
        return RunResult(WorkerState.FAILED, failures={})

    def _find_early_exit(self, local_ranks: Sequence[int]) -> Failure | None:
        """Return the end of this pod's ranks as a failure if their peers have lost them; None: there is another reason.

        A process closes its connections before it ends, so that peers may fail, and request a restart, before this pod
        knows of the end.
        """
        deadline = time.monotonic() + _SECONDS_FOR_CAUSE
        while True:
            unfinished = query_store(self._find_unfinished)
            if unfinished is None or unfinished.explained:
                return None
            if time.monotonic() > deadline:
                break
            time.sleep(_SECONDS_BETWEEN_READS)
        left = self._describe_end(local_ranks)
        if left is None:
            return None
        self._interruption = ""
        return build_early_exit(self._pod, left, f"pod {unfinished.pod}")

    def _describe_end(self, local_ranks: Sequence[int]) -> RankEnd | None:
        """Return how the first of some ranks of this pod ended that have exited with 0."""
        return next(iter(self._launcher.request(EndsNeeded(local_ranks))), None)

    def _is_unfinished(self) -> bool:
        """Return whether other pods train on. Raises: RuntimeError without the store."""
        if self._pod.is_multi_node and not self._interruption:
            unfinished = self._find_unfinished()
            self._interruption = unfinished.reason if unfinished is not None else ""
        return bool(self._interruption)

    def _find_unfinished(self) -> Unfinished | None:
        return self._pod_rendezvous.find_unfinished(self._round_state.read_ended_pods)

    def _list_ending_ranks(self) -> list[int]:
        """Return the local ranks that have recorded an exception, and have had enough time to end after it.

        Teardown of a GPU and functions of ``atexit`` may take long, while peers notice the closed connections at once.
        """
        now = time.monotonic()
        running = self._ranks.list_running()
        for local_rank in list_error_files(self._pod).intersection(running):
            self._recorded.setdefault(local_rank, now)
        is_awaited = self._peers_wait or len(running) < len(self._ranks.pids)
        patience = _SECONDS_TO_PRINT if is_awaited else max(self._pod.grace, _SECONDS_TO_STOP)
        return [rank for rank, since in self._recorded.items() if rank in running and now - since >= patience]

    def _share_lost_places(self, exit_codes: Mapping[int, int]) -> None:
        """Share once where ranks of this pod have lost a peer, which may be one that gloo has aborted."""
        has_failed = bool(self._recorded) or any(exit_codes.values())
        if has_failed and self._pod.is_multi_node and not self._has_shared_places:
            self._has_shared_places = True  # once: a store that does not respond would delay each look at the ranks
            self._round_state.share_lost_places()

    def _lacks_cause(self, exit_codes: Mapping[int, int]) -> bool:
        """Return whether ranks of this pod still run while the others have failed because they lost a peer."""
        is_over = len(exit_codes) == len(self._ranks.pids) or 0 in exit_codes.values()
        return not is_over and self._are_secondary(exit_codes)

    def _awaits_cause(self) -> bool:
        """Return whether a running rank of this pod may be the cause of lost peers, and end soon."""
        if self._pod_rendezvous.is_cause_known:
            return False
        if self._cause_deadline is None:
            self._cause_deadline = time.monotonic() + _SECONDS_FOR_CAUSE
            self._launcher.request(PeersLost())  # it writes the error file of a rank outside of collectives
        return time.monotonic() < self._cause_deadline

    def _report_job(self, job: Mapping[str, Any]) -> None:
        """Report to the launcher what pod 0 has published: for features, and why ranks do not train as one."""
        for feature, summary in job.get("features", {}).items():
            self._launcher.report(FeatureSummary(feature, summary))
        if job and job.get("groups") != self._groups:
            self._groups = job.get("groups")
            self._launcher.report(GroupFindings(self._groups))

    def _collect_result(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks. torchrun itself reaps those that it has started."""
        if isinstance(self._ranks, ForkedRanks):
            return self._ranks.build_result(worker_group.workers)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _report_failures(self, result: RunResult, ended_peers: EndedPeers, ended: Collection[int]) -> None:
        """Report the failures to the launcher, which decides whether the ranks restart.

        ``ended``: the local ranks that ended before the agent stopped the others.
        """
        ends = [
            read_process_failure(rank, failure, self._ranks.failed_at)._replace(stopped=failure.local_rank not in ended)
            for rank, failure in result.failures.items()
        ]
        if self._interruption:
            found = [examine_worker(self._pod, end) for end in ends]
            failures = [attribute_to_interruption(failure, self._interruption) for failure in found]
        else:
            failures = [examine_worker(self._pod, end, ended_peers) for end in ends]
        if self._has_lost_store and self._pod.node != 0:
            failures = [attribute_to_lost_master(failure) for failure in failures]
        self._request_verdict(failures, ended_peers, self._find_other_side(ends))

    def _find_other_side(self, ends: Sequence[WorkerEnd]) -> Sequence[RankPlace]:
        """Return where ranks of other pods were when gloo aborted one of this pod, as their sizes differ."""
        aborted = [end.local_rank for end in ends if end.exit_code == -signal.SIGABRT]
        if not aborted or not self._pod.is_multi_node:
            return ()
        state: RoundState = self._round_state
        return state.await_lost_places(
            lambda: any(OTHER_SIZES.search(read_end(self._pod, local_rank)) for local_rank in aborted)
        )

    def _request_verdict(
        self, failures: Sequence[Failure], ended_peers: EndedPeers, peers: Sequence[RankPlace] = ()
    ) -> None:
        """Ask the launcher whether the ranks restart. Pods that have ended wait no longer in an interruption.

        The loop of torch.distributed.elastic asks ``_remaining_restarts`` next: 1 makes it call ``_restart_workers``,
        0 ends the run.
        """
        is_interrupted = bool(self._interruption) and all(failure.secondary for failure in failures)
        has_ended_peers = ended_peers.pods > 0 and not is_interrupted
        event = RanksFailed(failures, has_ended_peers, self._read_step(), is_interrupted, peers)
        verdict: Verdict = self._launcher.request(event)
        self._pod_rendezvous.knows_cause = verdict.knows_cause
        self._remaining_restarts = int(verdict.restart)

    # -- restart and end

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        step = None
        if worker_group.state == WorkerState.HEALTHY:  # the ranks run: another pod has requested the restart
            if not self._find_interruption() and (self._has_own_failure() or self._awaits_cause()):
                return
            self._pod_rendezvous.knows_cause = False
            step = self._read_step()
        self._delay = self._launcher.request(Restarting(self._pod_rendezvous.is_cause_known, step))
        self._restarts += 1
        super()._restart_workers(worker_group)

    def _has_own_failure(self) -> bool:
        """Return whether a rank of this pod has failed or hangs, which is reported before other pods' request.

        A rank that has only lost a peer is not waited for once a pod knows why: its end may take longer than a restart.
        """
        self._peers_wait = True
        self._list_ending_ranks()
        if any(self._ranks.poll().values()):
            return True
        has_only_lost_peers = self._are_secondary(dict.fromkeys(self._recorded, 1))
        return bool(self._recorded) and not (self._pod_rendezvous.is_cause_known and has_only_lost_peers)

    def _are_secondary(self, exit_codes: Mapping[int, int]) -> bool:
        """Return whether ranks with these exit codes have failed because they lost a peer."""
        ends = [WorkerEnd(code, local_rank=rank) for rank, code in exit_codes.items()]
        return all(examine_worker(self._pod, end).secondary for end in ends)

    def _read_step(self) -> float | None:
        """Return the run's step, which pod 0 knows itself."""
        step: float | None = self._round_state.read_step() if self._pod.node != 0 else None
        return step

    def _shutdown(
        self, death_sig: Any = signal.SIGTERM, timeout: float = _SECONDS_TO_STOP, is_restart: bool = False
    ) -> None:
        """Stop the ranks. PyTorch 2.6 has the option ``is_restart``, later versions ``timeout``."""
        self._stop_ranks(death_sig)
        # PyTorch 2.6 would end the run for all pods, also where only this one stops; run_torchrun ends it.
        super()._shutdown(death_sig, **({"is_restart": True} if _SHUTDOWN_KNOWS_RESTARTS else {}))
        self._ranks.close()

    def _stop_ranks(self, number: int, ending: Sequence[int] = ()) -> None:
        """Stop the ranks. Those that are ``ending`` have failed and nothing to save."""
        is_stopping = os.path.exists(os.path.join(self._pod.runtime, STOPPING_FILE))
        # Before the first signal: when a rank of a peer fails because ranks here end, the peer has to find the reason.
        if is_stopping and self._pod.is_multi_node:
            query_store(self._pod_rendezvous.announce_stop)
        for part in self._parts:
            self._prepare_stop(part)
        self._ranks.kill(ending)
        may_save = self._pod.elastic or is_stopping or self._have_agreed_to_end(self._ranks.poll())
        grace = self._pod.grace if may_save else _SECONDS_TO_STOP
        if not is_stopping and self._has_lost_member():
            grace = min(grace, _SECONDS_TO_STOP_IN_VAIN)
        self._ranks.stop(number, grace, saves=may_save, trainers=list_trainers(self._pod))

    def _has_lost_member(self) -> bool:
        """Return whether another pod takes the place of a member that was lost without an announcement."""
        if not self._pod.is_multi_node or self._round_state is None:
            return False
        return bool(query_store(self._pod_rendezvous.has_lost_member))

    def _prepare_stop(self, part: AgentPart) -> None:
        """Call a feature, which may wait until the ranks can be stopped. They are stopped in any case."""
        try:
            part.prepare_stop(self._pod)
        except Exception as error:
            log_fault(part.name, error)

    def _exit_barrier(self) -> None:
        """Do nothing: ``_await_peers`` has waited, where a restart is still possible."""

    def is_interrupted(self) -> bool:
        """Return whether another pod was asked to stop in the current round."""
        return bool(self._round_state is not None and self._find_interruption())


class _Round:
    """What a feature may know of a round, and do in it."""

    def __init__(
        self, rendezvous: PodRendezvous, state: RoundState, launcher: LauncherChannel, worker_group: WorkerGroup
    ) -> None:
        self._rendezvous = rendezvous
        self._launcher = launcher
        self.number = rendezvous.current.number
        self.pods = state.pods
        self.store: Store = state.store
        self.ranks = [
            LocalRank(worker.local_rank, worker.global_rank, worker.world_size) for worker in worker_group.workers
        ]

    def is_over(self) -> bool:
        """Return whether the pods have to join another round."""
        return self._rendezvous.is_round_over()

    def report(self, event: object) -> None:
        """Report to the feature's service."""
        self._launcher.report(event)

    def request(self, request: object) -> Any:
        """Return what the feature's service replies."""
        return self._launcher.request(request)


def read_process_failure(rank: int, failure: Any, failed_at: dict[int, float]) -> WorkerEnd:
    """Return the end of a worker from torch's ProcessFailure, with the message of a script under @record.

    ``failed_at``: Unix seconds by local rank; torchrun's own times are of the check that found all failures.
    """
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
        time=failed_at.get(failure.local_rank, failure.timestamp),
        rank=rank,
        local_rank=failure.local_rank,
    )


def run_torchrun(
    request: AgentRequest, launcher: LauncherChannel, forker: RankForker | None, parts: Sequence[AgentPart]
) -> AgentEnd:
    """Run an agent to its end. ``parts``: of features. Failures were reported when they happened.

    Raises: ArgumentError, the failures that the features know, and the errors of the rendezvous.
    """
    pod = request.pod
    config = _configure(pod)
    rendezvous = PodRendezvous(pod)
    is_static = pod.rendezvous_backend == STATIC
    fields = _select(config, [field.name for field in dataclasses.fields(WorkerSpec)])
    fields.update(
        local_world_size=pod.nproc_per_node,
        entrypoint=request.command[0],
        args=tuple(request.command[1:]),
        max_restarts=request.restarts_left,
        rdzv_handler=rendezvous,
        local_addr=pod.address,
        master_addr=pod.master if is_static else None,
        master_port=pod.port if is_static else None,
    )
    spec = WorkerSpec(**fields)
    options = _select(config, inspect.signature(LocalElasticAgent.__init__).parameters)
    obstacle = _find_obstacle(config)
    if forker is not None and obstacle:
        log(f"ranks start in fresh interpreters, and each imports PyTorch: {obstacle}")
    elif forker is not None:
        options["logs_specs"] = ForkingLogs(
            options["logs_specs"], forker, request.command, spec.role, os.path.join(pod.runtime, "output")
        )
    agent = PodAgent(pod, rendezvous, launcher, request.restarts, parts, spec, **options)

    try:
        result = agent.run()
    except SignalException:
        interrupted = agent.is_interrupted()
        rendezvous.leave()
        return AgentEnd("signal", interrupted=interrupted)
    except TrainingOver:
        return AgentEnd("ok")
    except PodReplacedError:  # the run continues with its successor
        raise
    except Exception:
        rendezvous.shutdown()
        raise
    rendezvous.shutdown()
    return AgentEnd("ok" if result.state == WorkerState.SUCCEEDED else "failed")


def _configure(pod: Pod) -> Any:
    """Return torchrun's configuration: its defaults, and the options that the user has set. Raises: ArgumentError."""
    arguments = torchrun.get_args_parser().parse_args(["script"])
    arguments.nproc_per_node = str(pod.nproc_per_node)
    arguments.log_dir = os.path.join(pod.runtime, "torchrun")
    for name, value in vars(pod.torchrun).items():
        if value is None:
            continue
        if not hasattr(arguments, name):
            raise ArgumentError(f"PyTorch {torch.__version__} has no --{name.replace('_', '-')}")
        setattr(arguments, name, value)
    try:
        return torchrun.config_from_args(arguments)[0]
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def _find_obstacle(config: Any) -> str:
    """Return why torchrun has to start the ranks itself; empty if it does not."""
    flags = {
        "--numa-binding": "numa_options",
        "--duplicate-stdout-filters": "duplicate_stdout_filters",
        "--duplicate-stderr-filters": "duplicate_stderr_filters",
        "a template of the log's prefix": "log_line_prefix_template",
    }
    return ", ".join(flag for flag, name in flags.items() if getattr(config, name, None))


def _select(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes of torchrun's LaunchConfig that another of its classes takes, in any version."""
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
