"""The first process of every training pod: it runs torchrun and reports how the pod ended and why.

    launcher.py run -- <arguments of `python`, or a program with its arguments>
    launcher.py fetch               (in a pod without GPUs: fetch the job's inputs before the training pods start)
    launcher.py history …           (in a pod without GPUs: store the record of the ended job)
    launcher.py order               (in pod 0 of `ddp dev`: pass an order on to the process that holds the pod)
    launcher.py exec …              (for `ddp exec`: run a command with the environment of a rank)
    launcher.py worker …            (internal: a rank in a new interpreter)
    launcher.py forkserver …        (internal: import PyTorch once for the agent and the ranks)
    launcher.py podserver …         (internal: import PyTorch once for the pods of several runs on one machine)
    launcher.py tracking …          (internal: find the job's run in MLflow)
    launcher.py mirror …            (internal: fetch and upload the checkpoint folder)

The operator mounts it as launcher.py into any image that has Python >= 3.10 and torch >= 2.6. The archive beside it,
launcher.zip, has the rest of this package under the name ``ddp_launcher``. Each process of a pod dies with its parent:

    supervisor (standard library)  ->  fork server (imports torch)
                                   ->  mirror of checkpoint.url, if set (imports fsspec)
                                   ->  torchrun's agent (forked from it)  ->  its fork server
                                                                          ->  workers (forked from that, in the shim)
                                                                          ->  on pod 0 the rendezvous store

``docs/pod-contract.md`` has the environment, the exit codes and the files that the launcher reads and writes.
"""

import signal
import sys

_SIGNALS: list[int] = []  # received and not handled yet


def _catch_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda received, frame: _SIGNALS.append(received))


if __name__ == "__main__" and sys.argv[1:2] in (["run"], ["fetch"]):
    # The kernel drops signals for which a container's first process has no handler. Without these handlers, before
    # any slow import, a pod that is deleted right after its start would run for its whole grace period.
    _catch_signals()

import importlib
import os
import types
from contextlib import suppress
from typing import NoReturn

PACKAGE = "ddp_launcher"
_ARCHIVE = "launcher.zip"
_MODULES = {
    "exec": "rank.enter",
    "history": "features.history.store",
    "mirror": "features.mirror.process",
    "order": "features.dev.orders",
    "tracking": "features.tracking.runs",
}
_WITH_SIGNALS = {
    "fetch": "features.inputs.fetch",
}
_RANK_MODULES = (
    "rank.worker",
    "rank.part",
    "rank.child",
    "rank.steps",
    "rank.mapped_files",
    "rank.collectives",
    "rank.ending",
)
_SUBCOMMANDS = (*_MODULES, *_WITH_SIGNALS, "run", "worker", "forkserver", "podserver")


def main() -> int:
    """Run the subcommand. Returns the exit code."""
    subcommand = sys.argv[1] if len(sys.argv) > 1 else ""
    argv = sys.argv[2:]
    if subcommand not in _SUBCOMMANDS:
        sys.stderr.write(__doc__ or "")
        return 81
    _register_package()

    # Each subcommand imports only its own modules: every rank would compile the rest again.
    if subcommand in _MODULES:
        return int(_import(_MODULES[subcommand]).main(argv))
    if subcommand in _WITH_SIGNALS:
        return int(_import(_WITH_SIGNALS[subcommand]).main(_SIGNALS))
    is_forked = subcommand == "podserver"
    if is_forked:
        _import_for_pods()
        # It returns only in a forked launcher or rank.
        serve_pods = _import("torchrun.pod_server").serve_pods
        subcommand, argv = serve_pods(argv, _import_agent, _import_for_ranks, _run_agent, _catch_signals)
    if subcommand == "run":
        code = int(_import("supervise.main").main(argv, _SIGNALS, _import("features")))
        if is_forked:
            _end_at_once(code)
        return code
    if subcommand == "forkserver":
        # It returns only in a forked rank, with the arguments of the rank's shim.
        argv = _import("torchrun.fork_server").serve(argv, _import_agent, _import_for_ranks, _run_agent)
    _import("rank.worker").main(argv, _load_rank_part)  # raises SystemExit
    return 0


def _end_at_once(code: int) -> NoReturn:
    """End a launcher that was forked with PyTorch: to free its modules takes longer than all that a launcher does."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)


def observe_child(runtime: str, local_rank: int) -> None:
    """Observe this process, which a rank's program has started. Its sitecustomize calls this."""
    _register_package()
    _import("rank.child").ChildHook(runtime, local_rank, _load_rank_part).start()


def _import_for_pods() -> None:
    """Import what launchers will need: each would compile it again after its fork."""
    _import("supervise.main")
    _import_features("launcher")


def _import_for_ranks() -> None:
    """Import what ranks will need, before they are forked, for the same reason."""
    for name in _RANK_MODULES:
        _import(name)
    _import_features("rank")


def _import_agent() -> None:
    """Import what an agent will need, after PyTorch: it would compile it after its fork."""
    _import("torchrun.agent")
    _import("torchrun.launch")
    _import_features("agent")


def _import_features(module: str) -> None:
    """Import a module of all features that this pod uses."""
    with suppress(ValueError):  # there is no plan, as the launcher reports
        _import("features").import_modules(module, _import("base.pod_setup").read_pod(os.environ, ""))


def _run_agent(fork: object) -> None:
    _import("torchrun.launch").run_agent(fork, _import("features").load_agent_parts)


def _load_rank_part(name: str) -> object:
    """Return a feature's part in a rank. Most ranks have none, and import nothing for it. Raises: any exception."""
    return _import("features").load_rank_part(name)


def _register_package() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    # The launcher's modules must not shadow the user's. Python puts the folder of the real file first in sys.path,
    # behind the symbolic links that a kubelet creates for a ConfigMap.
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    package = types.ModuleType(PACKAGE)
    package.__path__ = [os.path.join(folder, _ARCHIVE)]
    sys.modules[PACKAGE] = package


def _import(name: str) -> types.ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


if __name__ == "__main__":
    sys.exit(main())
