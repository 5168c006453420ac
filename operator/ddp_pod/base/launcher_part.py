"""What a feature declares of itself to the launcher."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

from .pod import Pod
from .service import Service


class NextRun(NamedTuple):
    """The run of a launcher on standby. ``former``: the archive whose code the folder has; empty: the plan's."""

    command: list[str]
    pod: Pod
    former: str


class StandbyLauncher(Protocol):
    """A launcher that has imported PyTorch and waits."""

    def wait(self, pod: Pod) -> NextRun | None:
        """Return the run; None: this process is needed no longer."""


class LauncherPart(NamedTuple):
    """A feature's part in the launcher. The hooks that it does not use are None.

    ``create``: its services, from the pod and the reader of the ranks; empty: it has nothing to do in this pod.
    ``prepare``: makes the ranks' program available, from the pod, the signals received so far, and the ``former``
    archive; returns whether packages were installed. Raises: PodSetupError. ``can_import_early``: prepares the import
    of PyTorch before the code of the run is known; returns whether it can.
    ``find_standby``: this launcher's wait for its run, by its environment. ``hold``: runs the pod instead of a
    launcher; returns the exit code.
    """

    create: Callable[[Pod, Any], Sequence[Service]] | None = None
    prepare: Callable[[Pod, list[int], str], bool] | None = None
    can_import_early: Callable[[Pod], bool] | None = None
    find_standby: Callable[[MutableMapping[str, str]], StandbyLauncher | None] | None = None
    hold: Callable[[Pod, list[str], list[int]], int] | None = None
