"""Whether this job's ranks train as one: combine the records of all processes of this pod's ranks."""

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ...base.files import log, try_write_json
from ...base.pod import Pod, WorkerRecord
from ...base.service import Conclusion, Service
from ...contract.failure_record import EVIDENCE_ERROR, EVIDENCE_EXIT_CODE, Failure
from ...contract.failure_table import NCCL, NETWORK
from ...contract.group_facts import ALONE, SEPARATE, TOGETHER, UNKNOWN, WAITING, GroupFacts
from ...contract.processes import find_family, kill, process_state
from ...contract.records import read_record
from ...failures.kinds import FATAL
from ...failures.rank_ends import describe_ended_ranks
from ...progress.output_ends import read_last_lines
from ...progress.rank_progress import RankReader
from ...rank.group_records import RankGroups, read_groups
from ...rank.groups import MEMBER, STEPPING, GroupRecord
from ...torchrun.feature_messages import GroupFindings
from .group_waits import GROUP_WAIT_FILE, MOST_JOINERS, Joiner, explain_wait
from .stacks import collect_stacks

_INTERVAL = 1.0  # seconds between two checks
_LONG_INTERVAL = 10.0  # the same once a group spans all ranks
_SECONDS_TO_REPORT = 10.0  # of a wait, or of steps without a group
_SECONDS_TO_SHARE = 2.0  # of a wait, after which the pods compare their ranks
_SECONDS_TO_GIVE_UP = 60.0  # of a wait that cannot end; the timeout of init_process_group is 30 minutes
_SECONDS_OF_SILENCE = 60.0  # of the ranks, after which their group is reported as unknown
_INTENDED = "if ranks are meant to work independently, set spec.processGroupPolicy: Ignore"
_SEPARATE_REMEDY = (
    "the operator runs torchrun itself: write the script as the command, without torchrun or another launcher, set "
    f"spec.procPerNode, and use RANK and WORLD_SIZE unchanged; {_INTENDED}"
)
_ALONE_REMEDY = (
    "call torch.distributed.init_process_group() in the script and wrap its model in DistributedDataParallel; "
    f"{_INTENDED}"
)


def judge_groups(ranks: Sequence[RankGroups], now: float, *, has_ended: bool = False) -> GroupFacts | None:
    """Return whether the ranks of the job form one group, as far as this pod shows; None: not known yet, or one rank.

    ``now``: Unix time; ``has_ended``: whether the ranks have ended: then nothing changes any more.
    """
    world = max((rank.worker.world_size or 1 for rank in ranks), default=1)
    if world == 1:
        return None
    facts = GroupFacts(UNKNOWN, world)
    if any(rank.coverage >= world for rank in ranks):
        message = f"a torch.distributed process group spans all {world} ranks"
        return dataclasses.replace(facts, state=TOGETHER, message=message)

    latest = now if has_ended else now - _SECONDS_TO_REPORT
    separate = [rank for rank in ranks if rank.coverage and (has_ended or _trains_since(rank, latest))]
    if separate:
        message = f"no process group spans all {world} ranks: {_describe_separate(separate[0])}"
        return dataclasses.replace(facts, state=SEPARATE, message=message, remedy=_SEPARATE_REMEDY)

    records = [record for rank in ranks for record in rank.records]
    stepping = [record for record in records if record.phase == STEPPING and record.since <= latest]
    library = next((record.library for record in records if record.library), "")
    if stepping and not library:
        message = _describe_alone(ranks, world, stepping)
        return dataclasses.replace(facts, state=ALONE, message=message, remedy=_ALONE_REMEDY)
    if not (stepping or has_ended or _have_been_silent(ranks, now)):
        return None
    return dataclasses.replace(facts, message=_explain_unknown(ranks, world, library))


def _trains_since(rank: RankGroups, latest: float) -> bool:
    """Return whether a rank makes steps while a process has had a smaller group since before ``latest``."""
    members = [record for record in rank.records if record.phase == MEMBER and process_state(record.pid)]
    return bool(rank.has_steps) and any(record.since <= latest for record in members)


def _describe_separate(rank: RankGroups) -> str:
    record = max((record for record in rank.records if record.largest), key=lambda record: record.largest)
    plural = "s" if record.largest > 1 else ""
    text = f"the group of rank {rank.worker.rank} has only {record.largest} rank{plural}"
    place = f" ({record.place})" if record.place else ""
    return f"{text}{place}" + (", started by a launcher inside the command" if record.run != rank.worker.run else "")


def _describe_alone(ranks: Sequence[RankGroups], world: int, stepping: Sequence[GroupRecord]) -> str:
    alone = [str(rank.worker.rank) for rank in ranks if set(rank.records) & set(stepping)]
    text = "rank {} trains" if len(alone) == 1 else "ranks {} train"
    message = f"no process group spans all {world} ranks: {text.format(', '.join(alone[:8]))} alone"
    option = next((record.option for record in stepping if record.option), "")
    if option:
        message += f"; the script trains in a group only with its option {option}, which torchrun does not pass: read "
        message += "LOCAL_RANK from the environment"
    return message


def _have_been_silent(ranks: Sequence[RankGroups], now: float) -> bool:
    return all(now - rank.worker.started > _SECONDS_OF_SILENCE and not rank.waiting for rank in ranks)


def _explain_unknown(ranks: Sequence[RankGroups], world: int, library: str) -> str:
    first = ranks[0]
    message = f"it is unknown whether the {world} ranks train together: "
    if library:
        return f"{message}rank {first.worker.rank} uses {library}, whose communication is not observed"
    if first.has_steps is None:
        return f"{message}there is no process group, and metrics.autoInstrument is false"
    if first.worker.kind == "program" and not first.records:
        return f"{message}no Python process of rank {first.worker.rank}'s program has shown a process group or a step"
    return f"{message}rank {first.worker.rank} has created no process group and made no optimizer step"


def _are_different_hosts(host: str, job_host: str) -> bool | None:
    """Return whether a host has none of the addresses of the job's host; None: the name service does not tell now."""
    own = _resolve(job_host)
    other = _resolve(host)
    return not own & other if own and other is not None else None


def _resolve(host: str) -> set[str] | None:
    """Return the addresses of a host, empty if it does not exist; None: the name service does not respond."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        return set() if error.errno == socket.EAI_NONAME else None
    except (OSError, UnicodeError):
        return None


def _waits_itself(rank: RankGroups) -> bool:
    is_only = rank.worker.kind == "program" and len(rank.waiting) == 1
    return is_only or rank.worker.pid in [record.pid for record in rank.waiting]


class GroupMonitor(Service):
    """Observes process groups. ``job_wait``: of the job's ranks, as pod 0 has published it."""

    name = "process groups"

    def __init__(self, pod: Pod, reader: RankReader) -> None:
        self._pod = pod
        self._reader = reader
        self._path = os.path.join(pod.runtime, GROUP_WAIT_FILE)
        self._shared: Sequence[Joiner] | None = None
        self._places: dict[int, str] = {}  # of local ranks that have not called init_process_group
        self._located_at = 0.0
        self._logged = ""
        self._different_hosts: dict[tuple[str, str], bool] = {}
        self.job_wait: GroupFacts | None = None
        self.facts: GroupFacts | None = None

    def run(self) -> None:
        """Observe continuously. Never returns."""
        while True:
            self.check()
            is_settled = self.facts is not None and self.facts.state == TOGETHER
            time.sleep(_LONG_INTERVAL if is_settled else _INTERVAL)

    def check(self) -> None:
        """Update the facts, and share what keeps ranks waiting."""
        now = time.time()
        ranks = read_groups(self._pod, self._reader.count_steps)
        facts = judge_groups(ranks, now)
        if facts is None or facts.state != TOGETHER:
            self._share(self._list_joiners(ranks, now))
        else:
            self._share(None)
            self.job_wait = None
        wait = self.job_wait
        if wait is not None and now - wait.since >= _SECONDS_TO_REPORT:
            facts = wait
        self.facts = facts
        self._end_wait(ranks, now)
        if facts is not None and facts.state != TOGETHER and facts.message != self._logged:
            self._logged = facts.message
            log(f"process group: {facts.message}" + (f"; {facts.remedy}" if facts.remedy else ""))

    def _end_wait(self, ranks: Sequence[RankGroups], now: float) -> None:
        """Kill this pod's ranks that wait for a group which cannot come about."""
        wait = self.job_wait
        plan = self._pod.watchdog
        if wait is None or not wait.is_final or now - wait.since < _SECONDS_TO_GIVE_UP:
            return
        if plan is None or plan.action == "Report":
            return
        # A launcher inside the command may start more processes: only a rank that waits itself, or whose only process
        # does, is ended.
        waiting = [rank.worker for rank in ranks if _waits_itself(rank)]
        for worker in [worker for worker in waiting if process_state(worker.pid)]:
            error = {
                "rank": worker.rank,
                "localRank": worker.local_rank,
                "type": WAITING,
                "message": wait.message,
                "exitCode": 128 + signal.SIGKILL,
                "time": now,
            }
            try_write_json(self._error_path(worker), error)
            log(f"killing rank {worker.rank}: its wait for a process group cannot end")
            for pid in find_family(worker.pid):
                kill(pid, signal.SIGKILL)

    def _error_path(self, worker: WorkerRecord) -> str:
        return os.path.join(self._pod.runtime, "errors", f"{worker.local_rank}.json")

    def report(self) -> Mapping[str, object]:
        """Return the facts for the report."""
        return {"groups": self.facts}

    def conclude(self) -> Conclusion:
        """Return the facts of ranks that have ended."""
        return Conclusion(groups=self.examine_ended())

    def examine_ended(self) -> GroupFacts | None:
        """Return the facts of ranks that have ended."""
        ranks = read_groups(self._pod, self._reader.count_steps)
        return judge_groups(ranks, time.time(), has_ended=True)

    def forget(self) -> None:
        """Forget the waits of ranks that restart."""
        self.job_wait = None
        self.facts = None

    def note(self, event: object) -> None:
        """Note why the job's ranks wait for their process group, as pod 0 has published it."""
        if isinstance(event, GroupFindings):
            facts = None if event.facts is None else read_record(GroupFacts, event.facts)
            self.job_wait = facts if facts is not None and facts.state == WAITING else None

    def explain(self, failure: Failure) -> Failure:
        """Return the failure of a rank that gave up a wait which the script causes as the mistake of the script."""
        wait = self.job_wait
        is_ended = failure.exception_type == WAITING  # by this service
        is_symptom = is_ended or failure.category in (NETWORK.name, NCCL.name) or failure.evidence == EVIDENCE_EXIT_CODE
        if wait is None or not wait.is_mistake or not is_symptom:
            return failure
        ranks = read_groups(self._pod)
        if not any(rank.waiting for rank in ranks if rank.worker.local_rank == failure.local_rank):
            return failure
        explained = dataclasses.replace(
            failure,
            category=FATAL.category,
            container_exit_code=FATAL.exit_code,
            secondary=False,
            exception_type=failure.exception_type or WAITING,
            message=wait.message if is_ended else f"{wait.message}; rank {failure.rank} gave up: {failure.message}",
            traceback=failure.traceback or read_last_lines(self._pod, failure.local_rank or 0),
            remedy=wait.remedy,
            evidence=EVIDENCE_ERROR,
        )
        if wait.rank in (None, failure.rank):
            return explained
        return dataclasses.replace(
            explained, rank=wait.rank, local_rank=None, pod_index=wait.pod, exit_code=None, traceback=""
        )

    def _list_joiners(self, ranks: Sequence[RankGroups], now: float) -> list[Joiner]:
        """Return this pod's part in a wait; empty as long as no rank of the job has waited for a while."""
        waits = [record.since for rank in ranks for record in rank.waiting]
        if self.job_wait is None and not any(now - since >= _SECONDS_TO_SHARE for since in waits):
            return []
        absent = [rank for rank in ranks if not (rank.waiting or rank.coverage)]
        self._locate([rank.worker for rank in absent], now)
        joiners: list[Joiner] = []
        for rank in ranks:
            joiners += self._build_joiners(rank)
        return joiners[:MOST_JOINERS]

    def _build_joiners(self, rank: RankGroups) -> Iterable[Joiner]:
        worker = rank.worker
        empty = Joiner(worker.rank, self._pod.node, job_store=worker.store)
        living = [record for record in rank.waiting if process_state(record.pid)]
        shown = living or rank.waiting or [record for record in rank.records if record.largest][:1]
        if not shown:
            has_failed = os.path.exists(self._error_path(worker))  # then its pod requests a restart, or ends the job
            ended = not process_state(worker.pid) and not has_failed
            place = self._places.get(worker.local_rank, "")
            if ended:  # with 0: torchrun ends all ranks after any other exit code
                place = describe_ended_ranks(self._pod, self._reader, [worker.local_rank])[0].line
            yield empty._replace(place=place, ended=ended)
        for record in shown:
            yield empty._replace(
                phase=record.phase if record.is_waiting else MEMBER,
                since=record.since,
                as_rank=record.rank,
                size=record.size,
                store=record.store,
                place=record.place,
                assigned=record.assigned,
                from_environment=record.from_environment,
                other_host=self._has_other_host(record.store, worker.store),
            )

    def _has_other_host(self, store: str, job_store: str) -> bool:
        """Return whether two addresses of stores, ``host:port``, have different hosts: names of one may differ."""
        hosts = store.rpartition(":")[0], job_store.rpartition(":")[0]
        if not all(hosts) or hosts[0] == hosts[1]:
            return False
        if hosts not in self._different_hosts:
            found = _are_different_hosts(*hosts)
            if found is None:
                return False
            self._different_hosts[hosts] = found
        return self._different_hosts[hosts]

    def _locate(self, workers: Sequence[WorkerRecord], now: float) -> None:
        """Find out at intervals where ranks are that have not called init_process_group."""
        if now - self._located_at < _LONG_INTERVAL:
            return
        self._located_at = now
        running = [worker for worker in workers if process_state(worker.pid)]
        stacks = collect_stacks(self._pod, self._reader, running, quiet=True) if running else {}
        self._places = {rank: stack.place for rank, stack in stacks.items() if stack.frames}

    def _share(self, joiners: Sequence[Joiner] | None) -> None:
        """Let the agent share this pod's part in a wait; None: its ranks wait no more."""
        if not self._pod.is_multi_node:
            self.job_wait = explain_wait(joiners or (), self._pod.nproc_per_node, is_local=True)
        elif joiners is None:
            with suppress(OSError):
                os.unlink(self._path)
        elif joiners != self._shared:
            try_write_json(self._path, {"joiners": joiners})
        self._shared = joiners
