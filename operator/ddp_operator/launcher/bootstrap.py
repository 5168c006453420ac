"""The first process of every training pod: it runs torchrun, and reports in one place how the pod ended and why.

    launcher.py run <torchrun flags> -- <what follows `python` on its command line>
    launcher.py run <torchrun flags> --no-python -- <program> …
    launcher.py fetch               (a pod without GPUs: fetches the job's inputs before there are others)
    launcher.py worker …            (internal: a rank in an interpreter of its own)
    launcher.py forkserver …        (internal: what imports PyTorch for the agent and the ranks)
    launcher.py tracking …          (internal: what finds the job's run in MLflow)
    launcher.py mirror …            (internal: what fetches and uploads the folder of checkpoints)

The operator mounts it, called launcher.py, into any image that has Python >= 3.9 and torch >= 2.2. The modules beside
it are the package ``ddp_launcher``. Processes of a pod, each of which dies with the one before it:

    supervisor (standard library)  ->  fork server (imports torch)
                                   ->  mirror of checkpoint.url, where there is one (imports fsspec)
                                   ->  torchrun's agent (forked from it)  ->  its fork server
                                                                          ->  workers (forked from that, in the shim)
                                                                          ->  on pod 0 the rendezvous store

``docs/pod-contract.md`` has the environment, the exit codes and the files that the launcher reads and writes.
"""

import signal
import sys

_SIGNALS: list[int] = []  # that have come and are not handled yet
if __name__ == "__main__" and sys.argv[1:2] in (["run"], ["fetch"]):
    # The kernel drops what a container's first process has no handler for: a pod that is deleted in its first moments
    # would go on for its whole grace time. So this comes before all that takes a while.
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(_number, lambda received, frame: _SIGNALS.append(received))

import importlib
import os

PACKAGE = "ddp_launcher"


def main() -> int:
    """Run the subcommand. Returns the exit code."""
    folder = os.path.dirname(os.path.abspath(__file__))
    # Our modules must not hide the user's. What Python puts there is the folder of the real file, behind the links that
    # a kubelet lays for a ConfigMap.
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    subcommand, words = sys.argv[1:2], sys.argv[2:]
    if subcommand not in (["run"], ["fetch"], ["worker"], ["forkserver"], ["tracking"], ["mirror"]):
        sys.stderr.write(__doc__ or "")
        return 81
    package = type(sys)(PACKAGE)
    package.__path__ = [folder]
    sys.modules[PACKAGE] = package
    if subcommand == ["tracking"]:
        found: int = importlib.import_module(f"{PACKAGE}.tracking").tracking_main(words)
        return found
    if subcommand == ["fetch"]:
        fetched: int = importlib.import_module(f"{PACKAGE}.fetch").fetch_main(_SIGNALS)
        return fetched
    if subcommand == ["forkserver"]:
        words = importlib.import_module(f"{PACKAGE}.fork_server").serve(words)  # returns in a rank
    if subcommand == ["mirror"]:
        ended: int = importlib.import_module(f"{PACKAGE}.mirror").mirror_main(words)
        return ended
    if subcommand != ["run"]:  # of which each rank compiles no more than it needs
        importlib.import_module(f"{PACKAGE}.worker").worker_main(words)
    code: int = importlib.import_module(f"{PACKAGE}.main").run_main(words, _SIGNALS)
    return code


if __name__ == "__main__":
    sys.exit(main())
