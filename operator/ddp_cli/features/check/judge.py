"""Judge the runs of a check."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ddp_cli.features.check.recordings import Recording, read_recording
from ddp_cli.features.check.resume import judge_continuation, judge_resume, judge_stop
from ddp_cli.features.check.runs import CheckedRun
from ddp_cli.features.check.training import judge_training
from ddp_cli.features.check.verdict import FAILED, NOT_APPLICABLE, PASSED, WARNING, CheckVerdict, not_applicable

# From effects to causes; the last cause of a check is named.
_CONSEQUENCES: Final = {
    "same initial weights": ("gradients are shared", "resumes exactly"),
    "gradients are shared": ("same initial weights", "resumes exactly"),
    "weights change": ("resumes exactly", "gradients are shared"),
    "saved weights": ("resumes exactly",),
    "separate validation data": ("different data",),
    "one writer": ("resumes exactly",),  # which may find a half-written checkpoint
    "finite": ("resumes exactly",),  # weights that are not finite do not show the step
    "equal numbers of steps": (
        "gradients are shared",
        "different data",  # ranks whose steps do not belong together may get a batch of another epoch
        "same initial weights",
        "resumes exactly",
        "stops in time",
    ),
    "same parameters": ("gradients are shared", "same initial weights", "resumes exactly"),
    "one group": (
        "gradients are shared",
        "different data",
        "equal numbers of steps",
        "one writer",
        "same initial weights",
        "resumes exactly",
        "stops in time",
    ),
}
_MEANINGLESS: Final = ("weights change",)  # failures that also make it pass


def judge(runs: Sequence[CheckedRun]) -> list[CheckVerdict]:
    """Return the verdicts of all checks. ``runs``: the reference, whose ranks have made steps, and those after it."""
    recordings = {run.name.partition("-")[0]: read_recording(run.records) for run in runs}
    reference = recordings["reference"]
    repeat = recordings.get("repeat")
    world_size = max(process.start.world_size for process in reference.firsts)
    verdicts = judge_training(reference, world_size, runs[0].stall)
    if runs[0].succeeded:
        resume = judge_resume(reference, repeat, recordings.get("resumed"))
        later = (resume, _judge_stop(runs, recordings, is_exact=resume.state in (PASSED, WARNING)))
    else:
        later = (not_applicable("the reference has failed; repair its cause first"),) * 2
    verdicts.append(replace(later[0], check="resumes exactly"))
    verdicts.append(replace(later[1], check="stops in time"))
    return omit_consequences(verdicts)


def omit_consequences(verdicts: Sequence[CheckVerdict]) -> list[CheckVerdict]:
    """Report causes alone: a check is not applicable if a failed one that is reported makes it fail too.

    Weights that do not change are equal on all ranks and after each restart, so that proves nothing.
    """
    failures = {verdict.check for verdict in verdicts if verdict.state == FAILED}
    causes: dict[str, str] = {}
    reported: set[str] = set()
    for cause in reversed(_CONSEQUENCES):  # the first cause first: of two that explain each other, one is reported
        if cause in failures and cause not in causes:
            reported.add(cause)
            causes |= {check: causes.get(check, cause) for check in _CONSEQUENCES[cause] if check not in reported}
    return [
        CheckVerdict(verdict.check, NOT_APPLICABLE, f"repair `{causes[verdict.check]}` first")
        if verdict.check in causes and (verdict.state in (FAILED, WARNING) or causes[verdict.check] in _MEANINGLESS)
        else verdict
        for verdict in verdicts
    ]


def _judge_stop(runs: Sequence[CheckedRun], recordings: Mapping[str, Recording], *, is_exact: bool) -> CheckVerdict:
    """Judge how the script ends at SIGTERM. ``is_exact``: whether it resumes exactly from its regular checkpoints."""
    run = next((run for run in runs if run.name == "repeat"), None)
    repeat = recordings.get("repeat")
    if run is None or repeat is None:
        return not_applicable("the script was not stopped")
    if run.problem:
        return not_applicable("the run was ended before the script could be stopped")
    verdict = judge_stop(repeat, run.signalled, run.stop_seconds, torn=run.torn)
    continued = recordings.get("continued")
    if continued is None or verdict.state == FAILED:
        return verdict
    return judge_continuation(recordings["reference"], repeat, continued, is_exact=is_exact) or verdict
