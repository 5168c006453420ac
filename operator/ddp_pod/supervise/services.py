"""The services of one pod: each call of a hook, its exceptions and its result go through here."""

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from ..base.exceptions import describe
from ..base.files import log
from ..base.service import Answer, Conclusion, Control, Ending, Service
from ..contract.failure_record import Failure
from ..contract.group_facts import GroupFacts
from ..contract.progress import RankProgress, Uploads
from ..contract.records import encode_json, read_record, to_json
from ..contract.report import PodReport
from ..torchrun.frames import encode

_SECONDS_BEFORE_NEXT_RUN: Final = 30.0  # of a service's thread, after a fault
_REPORT_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(PodReport))
T = TypeVar("T")


class _Fault(NamedTuple):
    """A hook that does not work: it is logged once."""

    service: str
    hook: str


class Services:
    """The services of a pod. A fault of one that is not vital ends the hook's call only; the pod trains on."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = tuple(services)
        self._logged: set[_Fault] = set()
        self.faults = 0

    def start(self, control: Control) -> None:
        """Start all, each with its thread, if it has one."""
        for service in self._services:
            self._call(service, "start", partial(service.start, control), _is_none, None)
            if type(service).run is not Service.run:
                threading.Thread(target=self._run, args=(service,), daemon=True, name=service.name).start()

    def _run(self, service: Service) -> None:
        """Run a service's thread. It only observes, so even that of a vital service must not end the pod."""
        while True:
            try:
                service.run()
                return
            except Exception as error:
                self._note_fault(service, "run", error)
            time.sleep(_SECONDS_BEFORE_NEXT_RUN)

    def observe(self, ranks: Mapping[int, RankProgress]) -> None:
        """Pass the ranks' progress to all. In the thread that reads it also a vital service cannot end the pod."""
        for service in self._services:
            hook = partial(service.observe, ranks)
            self._call(service, "observe", hook, _is_none, None, may_end_pod=False)

    def list_watched(self) -> list[Any]:
        """Return the descriptors and sockets to wait for."""
        watched: list[Any] = []
        nothing: Sequence[Any] = ()
        for service in self._services:
            watched += self._call(service, "list_watched", service.list_watched, _are_open, nothing)
        return watched

    def find_timeout(self) -> float | None:
        """Return after how many seconds to call ``follow`` at the latest; None: only for an event."""
        unlimited: float | None = None
        timeouts = [
            self._call(service, "find_timeout", service.find_timeout, _is_timeout, unlimited)
            for service in self._services
        ]
        return min((timeout for timeout in timeouts if timeout is not None), default=None)

    def follow(self, ready: Sequence[Any]) -> None:
        """Call all for ready descriptors, and for deadlines."""
        for service in self._services:
            self._call(service, "follow", partial(service.follow, ready), _is_none, None)

    def are_ready(self) -> bool:
        """Return whether the agent may join the rendezvous."""
        return all(self._call(service, "is_ready", service.is_ready, _is_flag, True) for service in self._services)

    def note(self, event: object) -> None:
        """Pass an event to all."""
        for service in self._services:
            self._call(service, "note", partial(service.note, event), _is_none, None)

    def answer(self, request: object) -> object:
        """Return the reply of the service whose request it is, or ``Answer.LATER``. None if there is none.

        An agent waits for each reply, so a fault is answered as well.
        """
        for service in self._services:
            hook = partial(service.answer, request)
            reply = self._call(service, "answer", hook, _is_answer, Answer.NOT_MINE)
            if reply is not Answer.NOT_MINE:
                return reply
        return None

    def explain(self, failure: Failure) -> Failure:
        """Return the failure of a rank with a cause that only a service knows."""
        for service in self._services:
            hook = partial(service.explain, failure)
            failure = self._call(service, "explain", hook, _is_failure, failure)
        return failure

    def find_awaited(self) -> Failure | None:
        """Return the failure of a living rank for which its peers may have waited."""
        none: Failure | None = None
        for service in self._services:
            found = self._call(service, "find_awaited", service.find_awaited, _is_failure_or_none, none)
            if found is not None:
                return found
        return None

    def log_state(self) -> None:
        """Log what helps to find the cause of a hang."""
        for service in self._services:
            self._call(service, "log_state", service.log_state, _is_none, None)

    def forget(self) -> None:
        """Forget the present ranks, which restart."""
        for service in self._services:
            self._call(service, "forget", service.forget, _is_none, None)

    def list_processes(self) -> set[int]:
        """Return the processes that outlive an agent."""
        processes: set[int] = set()
        nothing: Sequence[int] = ()
        for service in self._services:
            processes.update(self._call(service, "list_processes", service.list_processes, _are_numbers, nothing))
        return processes

    def note_end(self, pid: int) -> None:
        """Report to all that a child of the launcher has ended."""
        for service in self._services:
            self._call(service, "note_end", partial(service.note_end, pid), _is_none, None)

    def finish(self, ending: Ending) -> None:
        """Call all for their last work, in their order."""
        for service in self._services:
            self._call(service, "finish", partial(service.finish, ending), _is_none, None)

    def are_finished(self) -> bool:
        """Return whether the last work of the vital services is done: the end of the pod waits for no other."""
        vital = [service for service in self._services if service.is_vital]
        return all(self._call(service, "is_finished", service.is_finished, _is_flag, True) for service in vital)

    def complete(self, ranks: Sequence[RankProgress]) -> Sequence[RankProgress]:
        """Return the ranks' progress with what the services know. As ``report``, it ends no pod."""
        for service in self._services:
            hook = partial(service.complete, ranks)
            ranks = self._call(service, "complete", hook, _are_ranks, ranks, may_end_pod=False)
        return ranks

    def report(self) -> dict[str, Any]:
        """Return the fields of ``PodReport`` that the services know.

        Also a vital service cannot end the pod here: this is the thread of a reader of the report.
        """
        fields: dict[str, Any] = {}
        for service in self._services:
            try:
                fields.update(_clean_report(service.report()))
            except Exception as error:
                self._note_fault(service, "report", error)
        return fields

    def read_page(self, path: str, query: str) -> bytes | None:
        """Return the text of a page that a service serves; None: none does. As ``report``, it ends no pod."""
        for service in self._services:
            try:
                page = service.read_page(path, query)
                if isinstance(page, str):
                    return page.encode()
                if page is not None:
                    return encode_json(page)
            except Exception as error:
                self._note_fault(service, "read_page", error)
        return None

    def conclude(self) -> Conclusion:
        """Return all parts in the end of the pod as one. Of several facts about groups the last ones are features'."""
        nothing = Conclusion()
        unsaved = []
        joined = nothing
        for service in self._services:
            part = self._call(service, "conclude", service.conclude, _is_conclusion, nothing)
            unsaved += [part.unsaved] if part.unsaved else []
            joined = Conclusion(
                unsaved="; ".join(unsaved), uploads=joined.uploads or part.uploads, groups=part.groups or joined.groups
            )
        return joined

    def _call(
        self,
        service: Service,
        name: str,
        hook: Callable[[], T],
        is_valid: Callable[[object], bool],
        default: T,
        *,
        may_end_pod: bool = True,
    ) -> T:
        """Return what a hook returns; ``default`` if it raises, or returns anything else, unless it is vital."""
        try:
            result = hook()
            if not is_valid(result):
                raise TypeError(f"{name} returned {type(result).__name__}")
        except Exception as error:
            if service.is_vital and may_end_pod:
                raise
            self._note_fault(service, name, error)
            return default
        return result

    def _note_fault(self, service: Service, name: str, error: Exception) -> None:
        self.faults += 1
        fault = _Fault(service.name, name)
        if fault in self._logged:
            return
        self._logged.add(fault)
        bug = describe(error)
        log(
            f"internal error of the launcher in {service.name}.{name}; the training continues without it. "
            f"Please report this: {bug['type']}: {bug['message']}\n{bug['traceback']}"
        )


def _clean_report(fragment: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a fragment, within the limits of a report. Raises: TypeError, or what their JSON raises."""
    unknown = set(fragment) - _REPORT_FIELDS
    if unknown:
        raise TypeError(f"report returned {', '.join(sorted(map(str, unknown)))}")
    values: dict[str, Any] = dict(fragment)
    # Read back as the operator does, because the pages are built from it where no hook is called.
    read = read_record(PodReport, to_json(PodReport(**values)))
    return {name: getattr(read, name) for name in fragment}


def _is_none(value: object) -> bool:
    return value is None


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_timeout(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf)


def _is_failure(value: object) -> bool:
    return isinstance(value, Failure)


def _is_failure_or_none(value: object) -> bool:
    return value is None or isinstance(value, Failure)


def _are_numbers(value: object) -> bool:
    return isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(number, int) for number in value)


def _are_ranks(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(rank, RankProgress) for rank in value)


def _is_answer(value: object) -> bool:
    """Return whether a reply can be sent. Raises: what pickle raises otherwise."""
    return value in (Answer.NOT_MINE, Answer.LATER) or bool(encode(value))


def _are_open(value: object) -> bool:
    """Return whether one can wait for each descriptor. Raises: OSError for a closed one, which ``select`` refuses."""
    if not isinstance(value, (list, tuple)):
        return False
    for item in value:
        os.fstat(item if isinstance(item, int) else item.fileno())
    return True


def _is_conclusion(value: object) -> bool:
    return (
        isinstance(value, Conclusion)
        and isinstance(value.unsaved, str)
        and isinstance(value.uploads, Uploads | None)
        and isinstance(value.groups, GroupFacts | None)
    )
