"""What works in the launcher beside torchrun's agent, behind one interface. The supervisor imports no feature.

The watch over hangs, the mirror of ``checkpoint.url`` and the copies in memory are services. The supervisor holds a
tuple of them and calls their hooks; docs/adr/0058-features-of-the-launcher.md has the reasons.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from ..contract.failure_record import Failure
from ..contract.group_facts import GroupFacts
from ..contract.progress import RankProgress, Uploads


class Answer:
    """What ``Service.answer`` returns instead of a reply."""

    NOT_MINE: Final[object] = object()
    """The request is another service's."""
    LATER: Final[object] = object()
    """The service replies by ``Control.reply``, when it has done what the agent waits for."""


class Control(Protocol):
    """What a service may ask of the supervisor. Only ``wake`` and ``is_stopping`` may be used from another thread."""

    @property
    def is_stopping(self) -> bool:
        """Whether the pod was asked to stop."""

    @property
    def has_agent(self) -> bool:
        """Whether an agent runs."""

    @property
    def finish_by(self) -> float | None:
        """When the pod's own work must be done, by the monotonic clock; None: the pod was not asked to stop."""

    def wake(self) -> None:
        """Make the supervisor call ``follow`` now."""

    def reply(self, reply: object) -> None:
        """Reply to a request for which ``answer`` has returned ``LATER``."""

    def restart_agent(self, failure: Failure) -> None:
        """Start another agent in place of one that has lost the rendezvous store by this failure."""

    def abort(self, failure: Failure) -> None:
        """End the workers, and the pod with this failure."""


class Ending(NamedTuple):
    """The workers have ended. ``checkpoint_step``: of the script's newest checkpoint; None: unknown."""

    succeeded: bool
    checkpoint_step: float | None


class Conclusion(NamedTuple):
    """A service's part in the end of the pod.

    ``unsaved``: the loss, which a pod that has trained to the end reports as its failure; empty: nothing.
    """

    unsaved: str = ""
    uploads: Uploads | None = None
    groups: GroupFacts | None = None


class Service:
    """A part of the launcher. Each method is a hook, called in the main thread unless its description states otherwise.

    None of those may wait: signals and the end of the agent are handled between two calls.
    """

    name: ClassVar[str] = ""
    is_vital: ClassVar[bool] = False
    """Whether the pod must not train without it. Its fault ends the pod; that of another one is logged once."""

    def start(self, control: Control) -> None:
        """Start before the first agent, which imports PyTorch meanwhile."""

    def run(self) -> None:
        """Work in a separate thread until the process ends. It runs again, after a pause, if it raises."""

    def observe(self, ranks: Mapping[int, RankProgress]) -> None:
        """Note the progress of the local ranks, which the launcher reads every few seconds. It may wait for seconds.

        It is called in the thread that reads them (``progress.keeper``).
        """

    def list_watched(self) -> Sequence[Any]:
        """Return the descriptors and sockets to wait for."""
        return ()

    def find_timeout(self) -> float | None:
        """Return after how many seconds to call ``follow`` at the latest; None: only for an event."""
        return None

    def follow(self, ready: Sequence[Any]) -> None:
        """Handle the descriptors that are ready, and deadlines. It follows each event of the pod, and ``wake``."""

    def is_ready(self) -> bool:
        """Return whether the agent may join the rendezvous. It waits until all services are ready."""
        return True

    def note(self, event: object) -> None:
        """Note what the agent reports, or another part of the launcher."""

    def answer(self, request: object) -> object:
        """Return the reply to a request of the agent, or a member of ``Answer``."""
        return Answer.NOT_MINE

    def explain(self, failure: Failure) -> Failure:
        """Return the failure of a rank with a cause that only this service knows."""
        return failure

    def find_awaited(self) -> Failure | None:
        """Return the failure of a rank that lives, for which its peers may have waited until they failed."""
        return None

    def log_state(self) -> None:
        """Log what helps to find the cause of a hang. It may wait for the ranks, and be called from any thread."""

    def forget(self) -> None:
        """Forget the present ranks, which restart."""

    def list_processes(self) -> Collection[int]:
        """Return its processes, which outlive an agent."""
        return ()

    def note_end(self, pid: int) -> None:
        """Note that a child of the launcher has ended."""

    def finish(self, ending: Ending) -> None:
        """Start the last work, in the order of the services."""

    def is_finished(self) -> bool:
        """Return whether the last work is done. The supervisor waits for a vital service, and calls ``follow``."""
        return True

    def complete(self, ranks: Sequence[RankProgress]) -> Sequence[RankProgress]:
        """Return the ranks' progress with what only this service knows. It may be called as ``report``."""
        return ranks

    def report(self) -> Mapping[str, object]:
        """Return its fields of ``PodReport``. It may be called from any thread, at any time."""
        return {}

    def read_page(self, path: str, query: str) -> object:
        """Return the response to a path of the pod's endpoint, a text or a record; None: the path is not its own.

        It is called in a thread of the endpoint, and may wait for a few seconds.
        """
        return None

    def conclude(self) -> Conclusion:
        """Return its part in the end of the pod, after the last work."""
        return Conclusion()
