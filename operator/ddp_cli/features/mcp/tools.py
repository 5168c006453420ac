"""The tools of `ddp mcp`: functions with bounded text as their result. The docstrings are what an assistant reads.

Arguments come from a program that may have read untrusted text. Names are checked, because a name is part of a path on
the API server or on this machine, and manifests are texts, never paths.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from ddp_cli.client.client import Client
from ddp_cli.client.errors import ClientError, NotFound
from ddp_cli.client.job import Job
from ddp_cli.client.logs import Line, find_newest, read_pods
from ddp_cli.client.validation import check_manifest
from ddp_cli.commands.list_jobs import format_table
from ddp_cli.commands.render import omit_data
from ddp_cli.commands.usage import choose_group, format_usage, sum_up
from ddp_cli.view.terminal import make_printable
from ddp_operator.api.constants import KIND
from ddp_operator.api.documents import load_documents
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.yaml_writer import format_documents

OUTPUT_BYTES: Final = 64 << 10
"""The limit of one result; an assistant's context is small."""
LOG_LINES: Final = 1000
LOG_PODS: Final = 16
LIST_ROWS: Final = 200
_LINE_CHARACTERS: Final = 2000
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_HIDDEN_STATUS: Final = ("points", "profile")
"""Points of a chart, and the copy of a profile."""


class ToolEntry(NamedTuple):
    """A tool: its name, the method of `JobTools`, and whether it changes or destroys objects."""

    name: str
    method: str
    reads_only: bool = True
    destroys: bool = False


READ_TOOLS: Final = (
    ToolEntry("list", "list_jobs"),
    ToolEntry("status", "read_status"),
    ToolEntry("why", "explain_job"),
    ToolEntry("logs", "read_logs"),
    ToolEntry("usage", "sum_usage"),
    ToolEntry("render", "render_manifest"),
)
WRITE_TOOLS: Final = (
    ToolEntry("submit", "submit_manifest", reads_only=False),
    ToolEntry("suspend", "suspend_job", reads_only=False),
    ToolEntry("resume", "resume_job", reads_only=False),
    ToolEntry("scale", "scale_job", reads_only=False),
    ToolEntry("delete", "delete_job", reads_only=False, destroys=True),
)


class JobTools:
    """The tools for one cluster, or for the runs on this machine."""

    def __init__(self, open_client: Callable[[str | None], Client], *, local: bool) -> None:
        self._open_client = open_client
        self._local = local

    def list_jobs(self, namespace: str | None = None, all_namespaces: bool = False) -> str:
        """List the training jobs of a namespace, or of all: phase, reason, progress, loss and restarts of each."""
        items = self._list_items(namespace, all_namespaces)
        if not items:
            return "no jobs"
        lines = format_table(items[-LIST_ROWS:], utc_now(), namespaces=all_namespaces)
        if len(items) > LIST_ROWS:
            lines.append(f"(the last {LIST_ROWS} of {len(items)} jobs; name a namespace)")
        return _limit("\n".join(lines))

    def read_status(self, name: str, namespace: str | None = None) -> str:
        """Return the status of a job as YAML: phase, conditions, progress, restarts, the last failure, GPU time."""
        job = self._find(name, namespace)
        status = dict(job.resource.get("status") or {})
        for field in _HIDDEN_STATUS:
            status.pop(field, None)
        return _limit(format_documents([{"metadata": {"name": job.name}, "status": status}]))

    def explain_job(self, name: str, namespace: str | None = None) -> str:
        """Explain what a job waits for or why it failed, and what to do about it."""
        job = self._find(name, namespace)
        return _limit("\n".join([str(job.why()), *job.links]))

    def read_logs(
        self,
        name: str,
        namespace: str | None = None,
        lines: int = 100,
        node: int | None = None,
        attempt: int | None = None,
    ) -> str:
        """Return the last lines of a job's log, each with the rank that wrote it.

        lines: at most 1000, shared by the pods. node: only the pod with this index; without it, the first 16 pods.
        attempt: only this attempt; without it, the newest.
        """
        if not 1 <= lines <= LOG_LINES:
            raise ClientError(f"lines: {lines} is not between 1 and {LOG_LINES}; request fewer lines, or one node")
        job = self._find(name, namespace)
        pods = find_newest(job.backend.logs(job.name, node=node, attempt=attempt, tail=None))
        if not pods:
            raise NotFound(f"{name} has no matching pod with a log; the tool why explains what the job waits for")

        shown = pods[:LOG_PODS]
        share = max(1, lines // len(shown))
        source = job.backend.logs(job.name, node=node, attempt=attempt, tail=share)
        text = _keep_end(read_pods(source, shown))
        if len(shown) < len(pods):
            text += f"\n({len(shown)} of {len(pods)} pods; pass node for another one)"
        return text or "the log is empty"

    def sum_usage(self, namespace: str | None = None, all_namespaces: bool = False, by_profile: bool = False) -> str:
        """Sum up the GPU time of jobs: productive, waiting and lost, and what it was lost to.

        A row is a job, with all_namespaces a namespace, with by_profile a profile. Deleted jobs are not counted.
        """
        group = choose_group(by_profile=by_profile, all_namespaces=all_namespaces)
        sums = sum_up(self._list_items(namespace, all_namespaces), group)
        return _limit("\n".join(format_usage(sums, group))) if sums else "no job has used a GPU"

    def render_manifest(self, manifest: str, whole: bool = False) -> str:
        """Check a DDPTrainingJob's YAML text without a cluster, and return what the operator would create.

        manifest: the YAML itself, not a path. whole: return the job completed by the profile in the text instead.
        Values of ConfigMaps are left out.
        """
        checked = check_manifest(manifest)
        if whole:
            return _limit(format_documents([{**checked.written, "spec": checked.completed}]))
        return _limit(format_documents(omit_data(child) for child in checked.children))

    def submit_manifest(self, manifest: str, namespace: str | None = None, dry_run: bool = False) -> str:
        """Create the job of a DDPTrainingJob's YAML text. dry_run: the API server only checks it.

        The text contains only the job; a user creates other objects and submits code with `ddp submit`.
        """
        kinds = [str(document.get("kind")) for document in load_documents(manifest)]
        if kinds != [KIND]:
            raise ClientError(
                f"the manifest contains {', '.join(kinds) or 'nothing'}; pass one {KIND}, and let a user create other "
                "objects with `ddp submit`"
            )
        backend = self._open(namespace).backend
        _, name, resource = backend.create(manifest, None, dry_run=dry_run)
        where = resource["metadata"].get("namespace")
        verb = "would be submitted" if dry_run else "submitted"
        return f"{name}: {verb}" + (f" to namespace {where}" if where and not self._local else "")

    def suspend_job(self, name: str, namespace: str | None = None) -> str:
        """Stop a job's pods after a checkpoint; resume continues the job."""
        self._find(name, namespace).suspend()
        return f"{name}: suspended; the pods save a checkpoint and exit"

    def resume_job(self, name: str, namespace: str | None = None) -> str:
        """Resume a suspended job."""
        self._find(name, namespace).resume()
        return f"{name}: resumed"

    def scale_job(self, name: str, nodes: int, namespace: str | None = None) -> str:
        """Change the number of nodes (pods) of a job."""
        if nodes < 1:
            raise ClientError(f"nodes: {nodes} is less than 1; suspend stops all pods")
        self._find(name, namespace).scale(nodes)
        return f"{name}: scaled to {nodes} nodes"

    def delete_job(self, name: str, namespace: str | None = None) -> str:
        """Delete a job and its pods, or a run with its folder on this machine. Checkpoints on claims are kept."""
        self._find(name, namespace).delete()
        return f"{name}: deleted"

    def _open(self, namespace: str | None) -> Client:
        """Return the client for a namespace. Raises: ClientError."""
        if namespace is None:
            return self._open_client(None)
        if self._local:
            raise ClientError("namespace: runs on this machine have none; leave it out")
        return self._open_client(_check_name("namespace", namespace))

    def _find(self, name: str, namespace: str | None) -> Job:
        """Return a job. Raises: ClientError."""
        return self._open(namespace).get(_check_name("name", name))

    def _list_items(self, namespace: str | None, all_namespaces: bool) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._open(namespace).backend.list(everywhere=all_namespaces)["items"]
        return items


def _check_name(argument: str, name: str) -> str:
    """Return a name that is safe in a path. Raises: ClientError."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ClientError(
            f"{argument}: {name[:80]!r} is not a name of lower-case letters, digits, - and .; call list for the names"
        )
    return name


def _limit(text: str) -> str:
    """Return printable text of at most ``OUTPUT_BYTES``, cut at its end."""
    data = make_printable(text).encode()
    if len(data) <= OUTPUT_BYTES:
        return data.decode()
    return data[:OUTPUT_BYTES].decode(errors="ignore") + f"\n(cut after {OUTPUT_BYTES} bytes)"


def _keep_end(lines: Iterable[Line]) -> str:
    """Return the last of these lines that fit into ``OUTPUT_BYTES``; a long line is cut."""
    kept: deque[str] = deque()
    size = 0
    for line in lines:
        text = make_printable(str(line))[:_LINE_CHARACTERS]
        kept.append(text)
        size += len(text.encode()) + 1
        while size > OUTPUT_BYTES:
            size -= len(kept.popleft().encode()) + 1
    return "\n".join(kept)
