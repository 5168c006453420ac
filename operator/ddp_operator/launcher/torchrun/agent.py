"""torchrun's agent of one pod: a subclass of torch's that reports to the launcher and restarts as the launcher decides.

It overrides methods that torch documents for subclasses, and uses public names otherwise.
"""

import dataclasses
import inspect
import os
import signal
import socket
import time
from typing import Any, Iterable, Optional, Sequence

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ...contract.names import EXIT_PREEMPTED, STOPPING_FILE
from ..failures.agent_failure import ArgumentError
from ..failures.rules import WorkerEnd
from ..failures.worker_failure import EndedPeers, examine_worker
from ..files import log
from ..network.preflight import PreflightError, find_fatal, run_preflight
from ..pod import Pod
from ..transfer.memory import wait_for_copies
from .agreement import RunStep, SharedSnapshot, SharedStall, count_ended_pods, wait_for_ended_pods
from .channel import AgentEvent, LauncherChannel
from .fork_server import RankForker
from .membership import FreeRestarts, GroupSize
from .ranks import (
    ForkedRanks,
    InterceptedLogs,
    RankProcesses,
    RanksPrepared,
    fork_ranks,
    handle_stop_signals,
    hold_stop_signals,
)
from .rendezvous import PodRendezvous, TrainingOver
from .store import SignedStore, host_store

_STATIC = "static"
_STORES: list[Any] = []  # hosted for torch's static rendezvous, as long as this process lives
_SECONDS_TO_STOP = 30.0  # for ranks that have nothing to save
_SECONDS_FOR_PEERS = 300.0  # that a pod whose ranks have ended waits for those of its peers
_SECONDS_FOR_PEERS_OF_RANK_0 = 5.0  # the same if the success of rank 0 is enough


class PodAgent(LocalElasticAgent):
    """The agent of a pod. Without ``InterceptedLogs`` torchrun starts its ranks, as interpreters.

    The launcher decides about restarts after failures. Restarts for other pods that join or leave are not counted.
    """

    def __init__(self, pod: Pod, launcher: LauncherChannel, restarts: int, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._pod = pod
        self._launcher = launcher
        self._logs: Any = options.get("logs_specs")
        handle_stop_signals()
        self._shared: Any = None  # of the current round
        self._ranks = RankProcesses({})
        self._has_failed = False
        self._restarts = 0  # by this agent
        self._restart_count = restarts  # of the group, also by former agents
        self._free_restarts = FreeRestarts()
        self._snapshot = SharedSnapshot(pod, launcher.synchronize)
        self._stall = SharedStall(pod)
        self._run_step = RunStep(pod)

    @property
    def _is_stopping(self) -> bool:
        return os.path.exists(os.path.join(self._pod.runtime, STOPPING_FILE))

    @property
    def _saves(self) -> bool:
        """Whether ranks that are stopped may save a checkpoint."""
        return self._is_stopping or self._pod.elastic

    # -- start

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._launcher.report({"phase": "Rendezvous"})
        handler = worker_group.spec.rdzv_handler
        if not isinstance(handler, PodRendezvous):
            super()._rendezvous(worker_group)
            self._shared = SignedStore(worker_group.store, self._pod.secret, _STATIC)
            return
        handler.restarts = self._restart_count
        super()._rendezvous(worker_group)
        self._shared = handler.share()
        if handler.restarts > self._restart_count:
            self._restart_count = handler.restarts
            self._launcher.report({"count": handler.restarts})

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks in the order of the pods. All pods have the same number of ranks."""
        size = spec.local_world_size
        first = group_rank * size
        total = group_world_size * size
        return [Worker(local, first + local, first + local, total, total) for local in range(size)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._check_network(worker_group)
        self._snapshot.share(self._shared, worker_group.group_world_size or 1)
        with hold_stop_signals():
            self._ranks = self._fork_ranks(worker_group) or RankProcesses(super()._start_workers(worker_group))
        self._launcher.report({"phase": "Running"})
        return dict(self._ranks.pids)

    def _check_network(self, worker_group: WorkerGroup) -> None:
        """Run the preflight when all pods have joined for the first time. Raises: PreflightError."""
        plan = self._pod.preflight
        handler = worker_group.spec.rdzv_handler
        if plan is None or (isinstance(handler, PodRendezvous) and handler.current.number != 0):
            return
        ranks = [(worker.local_rank, worker.global_rank, worker.world_size) for worker in worker_group.workers]
        report = run_preflight(torch, self._pod, plan, ranks)
        self._launcher.report({"preflight": report})
        fatal = find_fatal(report, plan)
        if fatal:
            raise PreflightError(fatal, report)

    def _fork_ranks(self, worker_group: WorkerGroup) -> Optional[ForkedRanks]:
        """Start the ranks by the fork server. Returns None if torchrun has to start them."""
        if not isinstance(self._logs, InterceptedLogs):
            return None
        self._logs.intercepts = True
        try:
            super()._start_workers(worker_group)
        except RanksPrepared as prepared:
            spec = worker_group.spec
            return fork_ranks(self._logs.forker, [str(spec.entrypoint), *spec.args], prepared, spec.role)
        finally:
            self._logs.intercepts = False
        return None

    # -- monitoring

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._share_state(worker_group)
        exit_codes = dict(self._ranks.poll())
        self._has_failed = any(exit_codes.values())
        if not self._has_failed:
            return self._collect_result(worker_group)
        ended_peers = EndedPeers() if self._pod.elastic else self._find_ended_peers(worker_group, exit_codes)
        self._stop_ranks(signal.SIGTERM)
        result = self._collect_result(worker_group)
        self._report_failures(result, ended_peers)
        return result

    def _share_state(self, worker_group: WorkerGroup) -> None:
        if not self._pod.is_multi_node:
            return
        now = time.monotonic()
        job_stall = self._stall.exchange(self._shared, worker_group.group_world_size or 1, now)
        if job_stall is not None:
            self._launcher.report({"board": job_stall})
        if self._pod.node == 0:
            self._run_step.post(self._shared, now)

    def _find_ended_peers(self, worker_group: WorkerGroup, exit_codes: dict[int, int]) -> EndedPeers:
        """Return the ranks of this pod and the number of other pods that have ended with exit code 0."""
        ranks = [worker.global_rank for worker in worker_group.workers if exit_codes.get(worker.local_rank) == 0]
        return EndedPeers(sorted(ranks), count_ended_pods(self._shared))

    def _collect_result(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks. torchrun itself reaps those that it has started."""
        if isinstance(self._ranks, ForkedRanks):
            return self._ranks.build_result(worker_group.workers)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _report_failures(self, result: RunResult, ended_peers: EndedPeers) -> None:
        """Report the failures to the launcher, and restart the ranks if it decides so."""
        ends = [read_process_failure(rank, failure, self._ranks.failed_at) for rank, failure in result.failures.items()]
        failures = [examine_worker(self._pod, end, ended_peers) for end in ends]
        not_counted = all(failure.secondary or failure.container_exit_code == EXIT_PREEMPTED for failure in failures)
        may_be_free = bool(failures) and self._pod.awaits_peers and not_counted and not self._is_stopping
        has_step = self._pod.node != 0 and self._pod.is_multi_node
        event = {
            "failures": [failure.to_json() for failure in failures],
            "free": may_be_free and self._free_restarts.take(),
            "step": self._run_step.read(self._shared) if has_step else None,
        }
        restarts = self._launcher.may_restart(event)
        # Pods that have ended join no further round: it would only time out.
        self._remaining_restarts = int(restarts and not ended_peers.pods)

    # -- restart and end

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self._has_failed and any(self._ranks.poll().values()):
            return  # this pod's own failure is reported before the restart that other pods request
        self._launcher.report({"restart": True})
        self._restarts += 1
        self._restart_count += 1
        # torchrun computes TORCHELASTIC_RESTART_COUNT from it, and counts only failures of its own ranks.
        self._remaining_restarts = worker_group.spec.max_restarts - self._restarts
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: float = _SECONDS_TO_STOP) -> None:
        self._stop_ranks(death_sig)
        super()._shutdown(death_sig)
        self._ranks.close()

    def _stop_ranks(self, number: int) -> None:
        wait_for_copies(self._pod.node, os.environ)
        grace = self._pod.grace if self._saves else _SECONDS_TO_STOP
        self._ranks.stop(number, grace, saves=self._saves)

    def _exit_barrier(self) -> None:
        if not self._pod.is_multi_node:
            return
        rank_0_is_enough = self._pod.success_policy == "RankZero" and self._pod.node == 0
        patience = _SECONDS_FOR_PEERS_OF_RANK_0 if rank_0_is_enough else _SECONDS_FOR_PEERS
        pods = self.get_worker_group().group_world_size or 1
        if not wait_for_ended_pods(self._shared, pods, patience) and rank_0_is_enough:
            log("rank 0 has succeeded, which is enough by spec.successPolicy: the other pods are not waited for")


def read_process_failure(rank: int, failure: Any, failed_at: dict[int, float]) -> WorkerEnd:
    """Return torchrun's ProcessFailure; of a script under @record its message contains a traceback.

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


def parse_arguments(words: Sequence[str]) -> Any:
    """Parse torchrun's command line. Raises: ArgumentError, after a message."""
    try:
        return torchrun.get_args_parser().parse_args(list(words))
    except SystemExit:
        raise ArgumentError from None


def run_torchrun(
    pod: Pod, arguments: Any, launcher: LauncherChannel, forker: Optional[RankForker], restarts: int
) -> AgentEvent:
    """Run an agent to its end. Returns the result for the launcher; failures were reported when they happened.

    ``arguments``: of torchrun, parsed; ``restarts``: of the workers so far. Raises: PreflightError, and the errors of
    the rendezvous.
    """
    config, entrypoint, args = torchrun.config_from_args(arguments)
    handler = _create_rendezvous(pod, config)
    options = _select(config, inspect.signature(LocalElasticAgent.__init__).parameters)
    obstacle = _find_obstacle(config)
    if forker is not None and obstacle:
        log(f"ranks start in fresh interpreters, and each imports PyTorch: {obstacle}")
    elif forker is not None:
        options["logs_specs"] = InterceptedLogs(options["logs_specs"], forker)
    spec = _build_worker_spec(pod, config, str(entrypoint), args, handler)
    agent = PodAgent(pod, launcher, restarts, spec, **options)

    try:
        result = agent.run()
    except SignalException as error:
        if isinstance(handler, PodRendezvous):
            _leave(handler)
        return {"result": "signal", "signal": int(error.sigval)}
    except TrainingOver:
        return {"result": "ok"}
    except Exception:
        handler.shutdown()
        raise
    handler.shutdown()
    return {"result": "ok" if result.state == WorkerState.SUCCEEDED else "failed"}


def _leave(handler: PodRendezvous) -> None:
    try:
        handler.leave()
    except Exception as error:  # the store has ended
        log(f"could not leave the rendezvous, so the other pods wait for missing heartbeats: {error}")


def _find_obstacle(config: Any) -> str:
    """Return why torchrun has to start the ranks itself; empty if it does not."""
    if not hasattr(config, "logs_specs"):
        return "this needs PyTorch 2.3 or later"
    flags = {
        "--numa-binding": "numa_options",
        "--duplicate-stdout-filters": "duplicate_stdout_filters",
        "--duplicate-stderr-filters": "duplicate_stderr_filters",
        "a template of the log's prefix": "log_line_prefix_template",
    }
    return ", ".join(flag for flag, name in flags.items() if getattr(config, name, None))


def _create_rendezvous(pod: Pod, config: Any) -> Any:
    """Return the handler of the rendezvous: torch's own for the static one."""
    if config.rdzv_backend != _STATIC:
        size = GroupSize(pod.nodes, config.min_nodes, config.max_nodes, pod.elastic)
        return PodRendezvous(pod, config.run_id, config.local_addr or socket.getfqdn(), size)
    if pod.local and pod.node == 0:
        # torch's own store would listen on all addresses. It uses one that this process hosts already.
        _STORES.append(host_store(pod.store_address, pod.port, multi_tenant=True))
    parameters = RendezvousParameters(
        _STATIC,
        config.rdzv_endpoint,
        config.run_id,
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        **config.rdzv_configs,
    )
    return get_rendezvous_handler(parameters)


def _build_worker_spec(pod: Pod, config: Any, entrypoint: str, args: Sequence[str], handler: Any) -> WorkerSpec:
    is_static = config.rdzv_backend == _STATIC
    fields = _select(config, [field.name for field in dataclasses.fields(WorkerSpec)])
    fields.update(
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=handler,
        master_addr=pod.master if is_static else None,
        master_port=pod.port if is_static else None,
    )
    return WorkerSpec(**fields)


def _select(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes of torchrun's LaunchConfig that another of its classes takes, in any version."""
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
