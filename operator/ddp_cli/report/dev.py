"""One run of a job of `ddp dev` for the page."""

import msgspec
from msgspec.structs import replace

from ddp_cli.report.cluster import read_history
from ddp_cli.report.run import RecordedRun, make_run
from ddp_operator.api.status import DevStatus, EndedRun, Restarts, Status


def select_run(recorded: RecordedRun, number: int) -> RecordedRun:
    """Return the run of a number among all that is recorded of a job. Raises: ValueError that names the known runs."""
    dev = recorded.status.dev
    if dev is None:
        raise ValueError(f"{recorded.name} is no job of `ddp dev`, so it has one run; remove --run")
    if number == dev.run:
        ended = dev.completion_time or recorded.status.completion_time
        status = replace(recorded.status, start_time=dev.start_time, completion_time=ended)
    else:
        former = next((run for run in dev.runs if run.run == number), None)
        if former is None:
            known = ", ".join(map(str, sorted({dev.run, *(run.run for run in dev.runs)} - {0})))
            raise ValueError(f"{recorded.name} has no report of run {number}; choose one of these with --run: {known}")
        status = _restore(recorded.status, former)

    start = status.start_time.timestamp() if status.start_time else 0.0
    end = status.completion_time.timestamp() + 1 if status.completion_time else float("inf")
    rows = [row for row in recorded.rows if start <= row["time"] <= end]
    return make_run(
        {**recorded.resource, "status": msgspec.to_builtins(status)},
        status,
        rows or read_history(status.history),
        [event for event in recorded.events if start <= event.time <= end],
        name=f"{recorded.name}, run {number}",
        command=recorded.command,
        facts=recorded.facts,
        under_way=True,  # its end is known
        ranks=recorded.ranks if number == dev.run else (),
        step_hint=recorded.step_hint if number == dev.run else "",
    )


def _restore(status: Status, run: EndedRun) -> Status:
    """Return the status as it was at the end of a former run."""
    return replace(
        status,
        phase="Held",
        dev=DevStatus(run=run.run, digest=run.digest, result=run.result, start_time=run.start_time),
        start_time=run.start_time,
        completion_time=run.completion_time,
        progress=run.progress,
        history=run.history,
        restarts=Restarts(in_place=run.restarts, all=run.restarts),
        last_restart=None,
        last_failure=run.failure,
        checkpoint=None,
        preflight=None,
        conditions=(),
    )
