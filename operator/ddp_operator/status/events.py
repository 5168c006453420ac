"""Which transitions are worth a line in ``kubectl describe``. Two statuses are compared: a repeated pass is silent."""

from collections.abc import Iterator

from ddp_operator.api.status import Status
from ddp_operator.cluster import Event
from ddp_operator.failures.text import describe_failure, describe_restart
from ddp_operator.status import conditions as c


def transition_events(old: Status, new: Status, in_place_limit: int | None = None) -> tuple[Event, ...]:
    """Return the events for the step from one status to the next, in the order in which things happened.

    ``in_place_limit``: how often a pod's workers may be restarted in place in an attempt, where only failures count.
    """
    return tuple(_events(old, new, in_place_limit))


def _events(old: Status, new: Status, in_place_limit: int | None) -> Iterator[Event]:
    accepted = new.condition(c.ACCEPTED)
    before = old.condition(c.ACCEPTED)
    if accepted and accepted.status != "True" and (before is None or before.message != accepted.message):
        yield Event("Warning", accepted.reason, accepted.message)
    if new.last_failure is not None and new.last_failure != old.last_failure:
        failure = new.last_failure
        text = f"attempt {failure.attempt}: {describe_failure(failure)}"
        yield Event("Warning", f"Failure{failure.category}", text[:1000])
    if new.attempt == old.attempt and new.restarts.in_place > old.restarts.in_place:
        which = f"restart in place {new.restarts.in_place - new.restarts.in_place_before}"
        which += f" of {in_place_limit}" if in_place_limit is not None else ""
        cause = new.last_failure if new.last_failure != old.last_failure else None
        yield Event("Normal", c.RESTARTED_IN_PLACE, describe_restart(which, cause, new.checkpoint))
    if new.attempt != old.attempt or new.attempt_nodes != old.attempt_nodes:
        restarting = new.condition(c.RESTARTING)
        if old.attempt == 0:
            yield Event("Normal", "Started", f"attempt 1 with {new.attempt_nodes} nodes as Job {new.job_name}")
        elif restarting is not None:
            yield Event("Normal", restarting.reason, restarting.message)
    yield from _stalls(old, new)
    yield from _silences(old, new)
    for kind in (c.SUSPENDED, c.SCHEDULED, c.RENDEZVOUSED, c.DISTRIBUTED, c.SUCCEEDED, c.FAILED):
        now, then = new.condition(kind), old.condition(kind)
        if now is None or (then is not None and (then.status, then.reason) == (now.status, now.reason)):
            continue
        if kind == c.DISTRIBUTED:
            if now.status == "False":
                yield Event("Warning", now.reason, now.message)
        elif now.status == "True":
            yield Event("Warning" if kind == c.FAILED else "Normal", kind, now.message or now.reason)
        elif kind == c.SCHEDULED and now.reason in c.BLOCKING and now.reason != c.QUOTA_PENDING:
            yield Event("Warning", now.reason, now.message)
        elif kind == c.SUSPENDED and then is not None and then.status == "True":
            yield Event("Normal", "Resumed", "spec.suspend is false")


def _silences(old: Status, new: Status) -> Iterator[Event]:
    """Return the warning that a pod does not report any more, whose node may be lost."""
    then, now = old.condition(c.PROGRESSING), new.condition(c.PROGRESSING)
    for reason in (c.NODE_NOT_READY, c.WAITING_FOR_PEERS):
        if now is not None and now.reason == reason and (then is None or then.reason != reason):
            yield Event("Warning" if reason == c.NODE_NOT_READY else "Normal", reason, now.message)


def _stalls(old: Status, new: Status) -> Iterator[Event]:
    then, now = old.condition(c.PROGRESSING), new.condition(c.PROGRESSING)
    if now is None:
        return
    said = then.message if then is not None and then.reason == c.STALLED else None
    if now.reason == c.STALLED and said != now.message:
        yield Event("Warning", c.STALLED, now.message)
    elif said is not None and now.status == "True":
        yield Event("Normal", c.TRAINING, "training is making progress again")
