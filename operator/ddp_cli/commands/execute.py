"""`ddp exec`: run a command in the training container of a rank's pod, with the rank's environment."""

import argparse
import os
import shutil
import sys

from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.local_pod import find_local_pod
from ddp_cli.client.logs import LogPod, list_running_pods
from ddp_cli.commands.arguments import add_cluster_arguments, add_local_arguments, open_job
from ddp_cli.commands.io import CommandError, ExitCode, integer
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.template import resolve_template


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_local_arguments(parser)
    parser.add_argument("--rank", type=integer(0), default=0, metavar="RANK", help="default: 0")
    add_cluster_arguments(parser)
    parser.epilog = (
        "The command follows after --: ddp exec mine --rank 3 -- nvidia-smi; default: a shell in the rank's folder. "
        "In a cluster it needs kubectl and the permission pods/exec. The exit code is the command's."
    )


def run(arguments: argparse.Namespace) -> int:
    """Become the command. Raises: ClientError."""
    job = open_job(arguments)
    if isinstance(job.backend, ClusterBackend):
        job.require_pods_here()
        pods = list_running_pods(job.backend.api, job.name)
        pod = choose_pod(pods, arguments.rank, job.backend.argument(job.name))
        words = [*pod.launcher, "exec", str(arguments.rank % pod.nproc), "--", *arguments.extra]
        kubectl = build_kubectl(arguments, job.backend.api.namespace, pod, terminal=sys.stdin.isatty())
        if shutil.which(kubectl[0]) is None:
            raise CommandError("kubectl is not installed; install it: https://kubernetes.io/docs/tasks/tools/")
        os.execvp(kubectl[0], [*kubectl, "--", *words])  # noqa: S606
    nproc = resolve_template(parse_resource(job.resource, SCHEMA)).nproc
    local_pod = find_local_pod(job.backend.folder(job.name), arguments.rank // nproc)
    words = [*local_pod.launcher, "exec", str(arguments.rank % nproc), "--", *arguments.extra]
    os.chdir(local_pod.folder)
    os.execve(shutil.which(words[0]) or words[0], words, local_pod.environment)  # noqa: S606


def choose_pod(pods: list[LogPod], rank: int, name: str) -> LogPod:
    """Return the pod of a rank, of the newest attempt. Raises: CommandError."""
    newest = [pod for pod in pods if pod.attempt == pods[-1].attempt]
    if not newest:
        raise CommandError(f"no pod of the job runs; `ddp why {name}` explains the reason", ExitCode.FAILED)
    for pod in newest:
        if pod.node == rank // pod.nproc:
            return pod
    ranks = ", ".join(f"{pod.node * pod.nproc}-{(pod.node + 1) * pod.nproc - 1}" for pod in newest)
    raise CommandError(f"--rank {rank}: no running pod has it; running are the pods of ranks {ranks}")


def build_kubectl(arguments: argparse.Namespace, namespace: str, pod: LogPod, *, terminal: bool) -> list[str]:
    """Return the words of kubectl before the command in the container."""
    options = {"--kubeconfig": arguments.kubeconfig, "--context": arguments.context, "--namespace": namespace}
    chosen = [word for name, value in options.items() if value for word in (name, value)]
    return ["kubectl", *chosen, "exec", "-it" if terminal else "-i", pod.name, "-c", pod.container]
