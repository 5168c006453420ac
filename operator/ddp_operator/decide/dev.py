"""The accounting of the runs of a job whose pods are held between them: each one starts anew. Pure."""

from msgspec.structs import replace

from ddp_operator.api.status import DevStatus, RestartCounts, Status


def begin_run(status: Status, number: int) -> Status:
    """Return the status at the start of another run, without the measurements of the former one.

    A lower number than before: the code of the former run was lost with all pods; 0: they have no code, and the last
    failure remains.
    """
    last_run = status.dev.last_number if status.dev is not None else 0
    return replace(
        status,
        dev=DevStatus(run=number, last_run=last_run),
        progress=None,
        checkpoint=None,
        preflight=None,
        points=(),
        goodput=None,
        stragglers=(),
        last_restart=None,
        last_failure=None if number else status.last_failure,
    ).remember(restarts=forget_restarts(status.counts), start_step=None)


def forget_restarts(counts: RestartCounts) -> RestartCounts:
    """Return the counts at the start of a run, which has no failures and no restarts yet."""
    before = counts.total + counts.replaced
    return RestartCounts(total=counts.total, free=counts.free, replaced=counts.replaced, before_run=before)


def release_pods(dev: DevStatus | None) -> DevStatus | None:
    """Return the run of a job whose pods are not held."""
    return None if dev is None else replace(dev, release_time=None)
