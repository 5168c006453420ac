"""Run a job on this machine: reconcile after every change until the job has ended."""

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO, cast

import msgspec

from ddp_cli.local.adapt import Finding
from ddp_cli.local.container import ClaimInUse, ClaimLock
from ddp_cli.local.ending import build_failed_status, describe_run, interrupt
from ddp_cli.local.folder import DELETED, RunFolder, is_out_of_space
from ddp_cli.local.local_cluster import LocalCluster
from ddp_cli.local.log_times import LogClock
from ddp_cli.local.machine import describe_environment
from ddp_cli.local.recorder import RunRecorder
from ddp_cli.local.screen import LogFile, Tail, count, describe_wait, find_logs, format_line
from ddp_cli.local.store import workers_grace_of
from ddp_cli.view.display import FaultTolerantStream, View, choose_display
from ddp_cli.view.why import explain_why
from ddp_operator.api.cluster import Event, Key, Object
from ddp_operator.api.cluster_errors import AlreadyExists, ClusterError
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.claims import exclusive_claim, explain_use, name_claim
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import report_changes
from ddp_operator.decide.pace import build_paced_progress, drop_pace
from ddp_operator.decide.report import Page, apply_progress
from ddp_operator.features import FEATURES, SCHEMA
from ddp_operator.reconcile import Reconciler
from ddp_operator.reconcile.completing import CompletingReconciler
from ddp_operator.reconcile.turns import Turns
from ddp_operator.reconcile.workqueue import backoff
from ddp_pod.contract.processes import STOP_SIGNALS

_RETRY_SECONDS: Final = 1.0
_PENDING_SECONDS: Final = 2.0  # pods start within this time unless they wait for GPUs
_PROGRESS_SECONDS: Final = 1.0  # short, because no network and no API server is involved
_CHANGES_SECONDS: Final = 0.2
_MAX_ERRORS: Final = 8
"""Consecutive passes with an unexpected error after which the run stops: 13 seconds with the queue's back-off."""
_KEPT_KINDS: Final = ("ConfigMap", "Secret")
_RESTARTS: Final = (
    c.GROUP_RESTART,
    c.DISRUPTED,
    c.POD_REPLACEMENT,
    c.RESTARTED_IN_PLACE,
)
CLAIMS: Final = "claims"


@dataclass(frozen=True, slots=True)
class LocalRunPlan:
    """A run before it starts."""

    text: str
    command: str
    resource: Object
    others: Sequence[Object]
    children: Sequence[Object]
    nproc: int
    interpreter: str
    """The Python of the pods."""
    findings: Sequence[Finding]
    gpu_ids: Sequence[str] | None
    cpus: int
    folder_name: str
    runs_dir: Path
    metrics_base: int | None
    logs: str
    """The ranks whose output is shown: all, none, or a rank number."""
    plain: bool
    quiet: bool
    build_report: Callable[[Path], str] | None
    """Returns the HTML of the report on a run folder; None: there is no report."""


class CannotStart(Exception):
    """The run cannot start: a claim is in use, or the run folder cannot be created. The text has the remedy."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run: the job's phase, the first signal received, and whether an internal error ended it."""

    phase: str
    signal: int | None = None
    broken: bool = False


def run_job(plan: LocalRunPlan) -> RunOutcome:
    """Run the job to its end. Raises: CannotStart."""
    return asyncio.run(Run(plan).run())


class Run:
    """One `ddp run`."""

    def __init__(self, plan: LocalRunPlan) -> None:
        self._plan = plan
        self._started = time.monotonic()
        try:
            self._claim = _hold_claim(plan)
            self._plan = plan = _continue_tracking(plan, self._claim)
            self._folder = RunFolder.create(plan.runs_dir, plan.folder_name, utc_now())
            self._folder.write_manifest(plan.text, plan.children, plan.resource, plan.command)
        except OSError as error:
            remedy = "free space or " if is_out_of_space(error) else ""
            raise CannotStart(
                f"{error.filename or plan.runs_dir}: cannot create a run folder ({error.strerror or error}); {remedy}"
                "choose another --runs-dir"
            ) from None
        if self._claim is not None:
            self._claim.sign(f"process {os.getpid()} (run folder {self._folder.path})")
        name = plan.resource["metadata"]["name"]
        self._key = Key(plan.resource["metadata"].get("namespace") or "default", name)
        self._output = FaultTolerantStream(sys.stdout, self._on_output_lost)
        self._display = choose_display(name, cast(TextIO, self._output), quiet=plan.quiet, plain=plan.plain)
        self._cluster = LocalCluster(
            self._folder.path, plan.runs_dir / CLAIMS, metrics_base=plan.metrics_base, gpu_ids=plan.gpu_ids
        )
        self._folder.on_problem = lambda problem: self._display.line(f"warning     {problem}")
        self._recorder = RunRecorder(self._cluster, self._folder, utc_now)
        self._wake = asyncio.Event()
        self._signals: list[int] = []
        self._errors = 0
        self._broken: BaseException | None = None
        self._stopped = asyncio.Event()
        self._written = ""
        self._status = Status()
        self._url_shown = False
        self._showing = False
        self._follows = not plan.quiet and plan.logs != "none"
        self._has_spoken = False  # whether the script has printed a line
        self._has_hint = False  # whether the log or the display shows why no step is visible

    async def run(self) -> RunOutcome:
        """Run the job, then write status, report and summary."""
        loop = asyncio.get_running_loop()
        for number in {*STOP_SIGNALS} - {signal.SIGQUIT}:
            loop.add_signal_handler(number, self._on_signal, number)
        self._cluster.on_change = self._wake.set
        self._cluster.on_event = self._on_event
        self._cluster.kubelet.on_end = self._recorder.record_end
        self._cluster.kubelet.on_error = partial(self._give_up, "the end of a pod")
        loop.set_exception_handler(self._on_loop_error)
        self._recorder.on_page = self._show
        tasks: list[asyncio.Task[None]] = []
        try:
            self._add_objects()
            self._print_plan()
            hooks = Hooks(FEATURES)
            report = partial(report_changes, hooks.conditions)
            reconciler = CompletingReconciler(
                self._cluster, turns=Turns(), progress_interval=_PROGRESS_SECONDS, hooks=hooks, followers=(report,)
            )
            wait = await self._pass(reconciler)
            self._folder.announce()
            # The pods are starting; slow work, such as importing Rich, no longer delays them.
            self._showing = True
            await self._optional("environment.json", self._write_facts)
            tail = Tail(partial(find_logs, self._folder.logs), self._on_log_line)
            clock = LogClock(self._folder)
            tasks += [asyncio.create_task(self._optional("the times of log lines", clock.run))]
            tasks += [asyncio.create_task(self._optional("metrics", self._recorder.run))]
            tasks += [asyncio.create_task(self._optional("changes by other commands", self._apply_changes))]
            if self._follows:
                tasks += [asyncio.create_task(self._optional("the output of the ranks", tail.run))]
            await self._loop(reconciler, wait)
            await self._drain()
            if self._follows:
                tail.read()
            clock.note()
        except Exception as error:
            self._give_up("the run", error)
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
            await self._cluster.close()
            if self._claim is not None:
                self._claim.release()
        return await self._finish()

    def _add_objects(self) -> None:
        for item in self._plan.others:
            if item.get("kind") in _KEPT_KINDS:
                with suppress(AlreadyExists):
                    self._cluster.add(item)
        self._cluster.add(self._plan.resource)

    async def _loop(self, reconciler: Reconciler, wait: float | None) -> None:
        """Reconcile after every change, and at the time that the last pass requested, until the job has ended."""
        while not self._stopped.is_set() and not self._is_over():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):  # wait_for may swallow a cancellation
                    await self._wake.wait()
            wait = await self._pass(reconciler)

    async def _pass(self, reconciler: Reconciler) -> float | None:
        """Reconcile until no pass is due; return the seconds until the next pass, None: wait for a change."""
        while True:
            self._wake.clear()
            try:
                wait = await reconciler.reconcile(self._key)
                self._read_status()
            except ClusterError:
                wait = _RETRY_SECONDS
            except Exception as error:
                wait = await self._back_off(error)
            else:
                self._errors = 0
            if wait != 0 or self._is_over() or self._stopped.is_set():
                return wait

    async def _apply_changes(self) -> None:
        """Apply changes that other commands write to the run folder, as an API server would, until cancelled."""
        while True:
            changes = self._folder.read_changes()
            resource = self._cluster.store.get(self._plan.resource["kind"], self._key.namespace, self._key.name)
            deleted = changes.pop(DELETED, False)
            if deleted and not self._stopped.is_set():
                self._on_signal(signal.SIGTERM)
            elif changes and resource is not None:
                self._cluster.store.change(resource, spec={**resource["spec"], **changes})
            await asyncio.sleep(_CHANGES_SECONDS)

    async def _back_off(self, error: Exception) -> float | None:
        """Record an unexpected error in a pass and wait before the next; give up after many consecutive errors."""
        self._errors += 1
        if self._errors == _MAX_ERRORS:
            self._give_up(f"{self._errors} consecutive passes of the reconcile", error)
            return None
        self._record_error("a pass of the reconcile", error)
        if self._errors == 1:
            self._display.line(f"warning     internal error: {_name(error)} (see {self._folder.errors}); retrying")
        with suppress(TimeoutError):
            async with asyncio.timeout(backoff(self._errors)):  # also if the failed pass caused a change
                await self._stopped.wait()
        return 0

    async def _optional(self, purpose: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run an optional task: its failure is a warning."""
        try:
            await work()
        except Exception as error:
            self._record_error(purpose, error)
            self._display.line(f"warning     internal error: {_name(error)}; the run continues without {purpose}")

    def _give_up(self, where: str, error: BaseException) -> None:
        """Stop the run after an unexpected error: the state of the job is unknown."""
        self._record_error(where, error)
        if self._broken is None:
            self._broken = error
            self._stop(f"internal error: {_name(error)} in {where}; stopping")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record the exception of a callback, such as asyncio's own. It does not end the run."""
        error = context.get("exception")
        if error is None:
            loop.default_exception_handler(context)
        else:
            self._record_error(str(context.get("message")), error)

    def _record_error(self, where: str, error: BaseException) -> None:
        self._folder.write_error(utc_now(), where, error)

    async def _drain(self) -> None:
        """Stop the pods that still run, with their grace period."""
        self._cluster.stop()
        while self._cluster.kubelet.busy:
            self._wake.clear()
            if self._cluster.kubelet.busy:
                await self._wake.wait()

    async def _finish(self) -> RunOutcome:
        """Write the last status, the report and the summary."""
        if self._broken is not None:
            self._fail(self._broken)
        else:
            if self._signals:
                self._interrupt()
            self._read_status()  # again, because the last write may have failed
        self._display.update(self._view())
        await self._optional("the report", self._write_report)
        self._display.close()
        seconds = time.monotonic() - self._started
        summary = describe_run(
            self._key.name,
            self._status,
            self._folder,
            seconds=seconds,
            interrupted=self._broken is None and bool(self._signals),
        )
        self._folder.write(self._folder.summary, summary + "\n")
        self._output.write(summary + "\n")
        self._output.flush()
        if self._folder.read_changes().get(DELETED):
            shutil.rmtree(self._folder.path, ignore_errors=True)
        return RunOutcome(self._status.phase or "", next(iter(self._signals), None), self._broken is not None)

    def _was_interrupted(self) -> bool:
        failed = self._status.condition(c.FAILED)
        return failed is not None and failed.reason == other_reasons.INTERRUPTED

    async def _write_report(self) -> None:
        if self._plan.build_report is not None:
            self._folder.write(self._folder.report, self._plan.build_report(self._folder.path))

    async def _write_facts(self) -> None:
        self._folder.write_facts(describe_environment(self._plan.resource, Path.cwd(), os.environ))

    def _fail(self, error: BaseException) -> None:
        """Set the status to Failed with the internal error; the reconcile cannot."""
        message = (
            f"an internal error of ddp stopped the run: {_name(error)}: {error}. Please report the traceback in "
            f"{self._folder.errors.name}. Run the job again: it resumes from its checkpoint if spec.checkpoint is set"
        )
        resource = self._latest_resource()
        if resource is None or self._is_over():
            return
        try:
            job = parse_resource(resource, SCHEMA)
            self._cluster.store.change(
                resource, status=build_failed_status(job, other_reasons.OPERATOR_ERROR, message, utc_now())
            )
            self._read_status()
        except Exception as status_error:
            self._record_error("the last status", status_error)
            self._status = msgspec.structs.replace(self._status, phase="Failed")

    def _interrupt(self) -> None:
        """Set the status to interrupted, unless the job has ended."""
        resource = self._latest_resource()
        if resource is None:
            return
        changed = interrupt(resource, self._plan.command, utc_now(), number=self._signals[0])
        if changed is not None:
            self._cluster.store.change(resource, status=changed["status"])

    def _latest_resource(self) -> Object | None:
        """Return the resource with the latest progress, which is newer than that of the last pass."""
        resource = self._cluster.store.get(self._plan.resource["kind"], self._key.namespace, self._key.name)
        if resource is None:
            return None
        status = msgspec.convert(resource.get("status") or {}, Status)
        page = self._recorder.page
        updated = apply_progress(status, page.progress, page.uploads, utc_now())
        progress = build_paced_progress(page.progress, status.progress, self._recorder.rates)
        updated = msgspec.structs.replace(updated, progress=progress or status.progress)
        return {**resource, "status": msgspec.to_builtins(updated)}

    def _read_status(self) -> None:
        """Read the status from the cluster; write a new one to the folder."""
        resource = self._cluster.store.get(self._plan.resource["kind"], self._key.namespace, self._key.name)
        if resource is None or resource["metadata"]["resourceVersion"] == self._written:
            return
        former = self._status
        self._status = msgspec.convert(resource.get("status") or {}, Status)
        if self._status.attempt != former.attempt:
            self._recorder.page = Page()
            self._recorder.rates = None
        if self._status.phase == c.HELD and (former.phase, former.dev) != (c.HELD, self._status.dev):
            self._display.line(str(explain_why(resource, (), utc_now())))
        if self._folder.write_status(resource):
            self._written = resource["metadata"]["resourceVersion"]
        self._show()

    def _is_over(self) -> bool:
        return self._status.phase in ENDED_PHASES

    def _view(self) -> View:
        status = self._status
        page = self._recorder.page
        progress = status.progress  # of an ended job: its last page is older, and has a remaining time
        if not self._is_over():
            progress = build_paced_progress(page.progress, status.progress, self._recorder.rates) or progress
        processes = self._plan.resource["spec"]["nodes"] * self._plan.nproc
        spoken = self._has_spoken or not self._follows
        waits_for = (
            "" if self._is_over() or status.phase == c.HELD else describe_wait(status, page, processes, spoken=spoken)
        )
        if waits_for:
            progress = drop_pace(progress)
        elif not self._is_over() and status.is_false(c.TRAINS_AS_ONE):
            waits_for = "its ranks do not train as one"
        phase = other_reasons.INTERRUPTED if self._was_interrupted() else status.phase or "Pending"
        reason = status.reason if status.phase == "Succeeded" else waits_for
        return View(phase, status.attempt, reason, progress)

    def _show(self) -> None:
        view = self._view()
        if not self._showing or (view.phase == "Pending" and time.monotonic() - self._started < _PENDING_SECONDS):
            return
        if self._recorder.port is not None and not self._url_shown:
            self._url_shown = True
            self._display.line(f"metrics     curl http://127.0.0.1:{self._recorder.port}/metrics")
        self._show_step_hint()
        self._display.update(view)

    def _show_step_hint(self) -> None:
        """Display once why no step of the script is visible. The log of all ranks has this line already."""
        hint = self._recorder.page.step_hint
        if not hint or self._has_hint:
            return
        self._has_hint = True
        if self._plan.logs != "all":
            self._display.line(hint)

    def _on_log_line(self, file: LogFile, line: str) -> None:
        text = format_line(line, file, self._plan.nproc, self._plan.logs)
        if text is not None:
            self._has_spoken = True
            self._display.line(text)

    def _print_plan(self) -> None:
        """Print the job's size, the run folder, and ignored fields and objects."""
        plan = self._plan
        spec = plan.resource["spec"]
        device = f"GPUs {','.join(plan.gpu_ids)}" if plan.gpu_ids else f"{plan.cpus} CPUs"
        pods = count(spec["nodes"], "pod")
        if spec.get("spares"):
            pods += f" and {count(spec['spares'], 'spare')}"
        workers = count(plan.nproc, "worker process", "es")
        self._display.line(f"{self._key.name}: {pods} with {workers} each on this machine ({device})")
        shown = {"all": "all ranks", "none": "no rank"}.get(plan.logs, f"rank {plan.logs}")
        self._display.line(f"run folder  {self._folder.path} (logs of all ranks: logs/; shown here: {shown})")
        self._display.line(f"python      {plan.interpreter}")
        if plan.findings:
            fields = dict.fromkeys(finding.path.rpartition(".")[2] for finding in plan.findings)
            self._display.line(f"ignored     {', '.join(fields)} (see docs/local.md)")
        ignored = [str(item.get("kind")) for item in plan.others if item.get("kind") not in _KEPT_KINDS]
        if ignored:
            self._display.line(f"ignored     other objects of the file: {', '.join(ignored)}")

    def _on_event(self, resource: Object, event: Event) -> None:
        self._folder.write_event(utc_now(), event.type, event.reason, event.message)
        self._read_status()  # an Event is emitted after its status is written
        is_restart = event.reason in _RESTARTS
        # A failure is part of the message of a restart, or of the summary.
        is_shown = is_restart or (event.type == "Warning" and not event.reason.startswith("Failure"))
        if is_shown and not self._is_over():
            reason = "" if is_restart else f"{event.reason}: "
            self._display.line(f"{time.strftime('%H:%M:%S')} {reason}{event.message.splitlines()[0]}")

    def _on_output_lost(self, error: OSError) -> None:
        """Report on stderr that the run continues. Its exit code stays that of the job."""
        with suppress(OSError):
            print(
                f"ddp run: cannot write to standard output ({error.strerror}); "
                f"the run continues, follow it in {self._folder.path}",
                file=sys.stderr,
                flush=True,
            )

    def _on_signal(self, number: int) -> None:
        """Stop the pods at the first signal; kill them at the second."""
        self._signals.append(number)
        if not self._stopped.is_set():
            self._stop("stopping")
        else:
            self._display.line("killing all pods")
            self._cluster.kubelet.kill_all()
            self._wake.set()

    def _stop(self, reason: str) -> None:
        grace = max((workers_grace_of(pod) for pod in self._cluster.store.list("Pod")), default=0)
        again = " again" if self._signals else ""
        self._display.line(
            f"{reason}: the pods have {grace} s to save a checkpoint and exit; press Ctrl-C{again} to kill them now"
        )
        self._stopped.set()
        self._wake.set()


def _continue_tracking(plan: LocalRunPlan, claim: ClaimLock | None) -> LocalRunPlan:
    """Return the plan with the tracker's run id of the checkpoints from which it resumes. Raises: OSError."""
    spec = plan.resource["spec"]
    if claim is None or not spec.get("tracking") or spec["tracking"].get("runId"):
        return plan
    tracking = {**spec["tracking"], "runId": claim.tracking_run(plan.resource["metadata"]["name"])}
    return replace(plan, resource={**plan.resource, "spec": {**spec, "tracking": tracking}})


def _hold_claim(plan: LocalRunPlan) -> ClaimLock | None:
    """Lock the claim of the job's checkpoints. Raises: CannotStart, if another run uses it; OSError."""
    claim = exclusive_claim(parse_resource(plan.resource, SCHEMA))
    if claim is None:
        return None
    try:
        return ClaimLock(plan.runs_dir / CLAIMS, re.sub(r"[^-.\w]", "_", claim))
    except ClaimInUse as holder:
        field, remedy = explain_use(claim)
        raise CannotStart(
            f"{field}: {holder} writes its checkpoints to {name_claim(claim)}; wait until it ends, stop it, or choose "
            f"another. {remedy}"
        ) from None


def _name(error: BaseException) -> str:
    return type(error).__name__
