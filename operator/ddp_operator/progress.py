"""What a training pod's ``/metrics`` page says about progress.

The page comes from the user's pod: it is read line by line, only the known names are looked at, and nothing in it can
raise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from prometheus_client.parser import text_string_to_metric_families

from ddp_operator import constants
from ddp_operator.api.status import CheckpointStatus, PreflightStatus, Progress

_WANTED = frozenset({
    constants.METRIC_LOSS, constants.METRIC_EPOCH, constants.METRIC_EPOCHS, constants.METRIC_TOTAL_STEPS,
    constants.METRIC_PROGRESS, constants.METRIC_VAL_ACCURACY, constants.METRIC_VAL_LOSS,
    constants.METRIC_LEARNING_RATE, constants.METRIC_WORLD_SIZE, constants.METRIC_GLOBAL_RATE,
    constants.METRIC_LAST_STEP, constants.METRIC_CHECKPOINT_STEP, constants.METRIC_GLOBAL_STEP,
    constants.METRIC_SAMPLES, constants.METRIC_STEPS,
    constants.METRIC_STEP_SECONDS, constants.METRIC_DATA_SECONDS, constants.METRIC_COMPUTE_SECONDS,
    constants.METRIC_LAUNCHER_PHASE, constants.METRIC_LAUNCHER_RESTARTS,
    constants.METRIC_PREFLIGHT_PASSED, constants.METRIC_PREFLIGHT_SECONDS, constants.METRIC_ALL_REDUCE_RATE,
    constants.METRIC_HEARTBEAT_AGE, constants.METRIC_SAVING,
})  # fmt: skip
_PREFLIGHT = (constants.METRIC_PREFLIGHT_PASSED, constants.METRIC_PREFLIGHT_SECONDS, constants.METRIC_ALL_REDUCE_RATE)
_CHECKS = ("dns", "tcp", "allreduce")
# One pass over the page; a line that is no sample costs nothing but its length.
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)[^\n]*", re.MULTILINE)
_BY_RANK = {
    constants.METRIC_GLOBAL_STEP: "step",
    constants.METRIC_STEPS: "steps",
    constants.METRIC_COMPUTE_SECONDS: "compute",
    constants.METRIC_DATA_SECONDS: "data_wait",
}
_MAX_RANKS = 256  # of one pod
_MAX_SAMPLES = 4096
_MAX_LINE = 4096
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RankSample:
    """What one rank has done: steps of the run, and of its process with their seconds."""

    step: float = 0.0
    steps: float = 0.0
    compute: float = 0.0
    data_wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape. ``values`` are the wanted series of the lowest rank on the page."""

    values: Mapping[str, float] = field(default_factory=dict)
    launcher_phase: str = ""
    in_place_restarts: int = 0
    preflight: PreflightStatus | None = None
    ranks: Mapping[int, RankSample] = field(default_factory=dict)

    @property
    def meeting(self) -> bool:
        """True while the launcher waits for the other pods, before the first step or after a restart in place."""
        return self.launcher_phase in ("Starting", "WaitingForMaster", "Rendezvous")

    @property
    def training(self) -> bool:
        """True where workers that run have reported a step; what a log has shown stays on the page after them."""
        step = self.values.get(constants.METRIC_GLOBAL_STEP, self.values.get(constants.METRIC_STEPS, 0.0))
        return step > 0 and not self.meeting


def parse_page(text: str) -> Page:
    """Return what is readable of a page; garbage gives an empty Page."""
    chosen: dict[str, tuple[float, float]] = {}
    phase, restarts = "", 0
    preflight: dict[tuple[str, str], float] = {}
    by_rank: dict[int, dict[str, float]] = {}
    for name, labels, value in _samples(text):
        if name == constants.METRIC_LAUNCHER_PHASE:
            if value == 1 and labels.get("phase") in constants.LAUNCHER_PHASES:
                phase = labels["phase"]
        elif name == constants.METRIC_LAUNCHER_RESTARTS:
            restarts = int(min(max(value, 0), _MAX_INT)) if math.isfinite(value) else 0
        elif name in _PREFLIGHT:
            preflight[name, labels.get("check", "")] = value
        else:
            rank = _rank(labels)
            room = rank in by_rank or len(by_rank) < _MAX_RANKS
            if name in _BY_RANK and room and math.isfinite(rank) and math.isfinite(value):
                by_rank.setdefault(int(rank), {})[_BY_RANK[name]] = value
            if name not in chosen or rank < chosen[name][0]:
                chosen[name] = (rank, value)
    values = {name: value for name, (_, value) in chosen.items()}
    ranks = {rank: RankSample(**found) for rank, found in by_rank.items()}
    return Page(values, phase, restarts, _build_preflight(preflight) if preflight else None, ranks)


def build_progress(values: Mapping[str, float], previous: Progress | None = None) -> Progress | None:
    """Return the status block for a set of series, or None where they say nothing of progress.

    The ETA is the finished part extrapolated at the current rate: remaining samples over samples a second. With no
    rate or no total it is left out rather than guessed.
    """
    # A process that has made no step yet does not say where the run stands: it may go on from a checkpoint.
    steps = values.get(constants.METRIC_GLOBAL_STEP, values.get(constants.METRIC_STEPS) or None)
    if steps is None and constants.METRIC_LOSS not in values:
        return None
    total, ratio = values.get(constants.METRIC_TOTAL_STEPS), values.get(constants.METRIC_PROGRESS)
    if ratio is None and steps is not None and total:
        ratio = steps / total
    eta = _eta(values, steps, total)
    last = values.get(constants.METRIC_LAST_STEP)
    return Progress(
        epoch=_whole(values.get(constants.METRIC_EPOCH)),
        epochs=_whole(values.get(constants.METRIC_EPOCHS)),
        step=_whole(steps),
        total_steps=_whole(total),
        percent=None if ratio is None or not math.isfinite(ratio) else f"{100 * min(max(ratio, 0.0), 1.0):.1f}%",
        eta_seconds=eta,
        eta=None if eta is None else format_duration(eta),
        loss=_number(values.get(constants.METRIC_LOSS)),
        samples_per_second=_number(values.get(constants.METRIC_GLOBAL_RATE)),
        val_accuracy=_number(values.get(constants.METRIC_VAL_ACCURACY)) or (previous and previous.val_accuracy) or None,
        val_loss=_number(values.get(constants.METRIC_VAL_LOSS)) or (previous and previous.val_loss) or None,
        last_step_time=_time(last),
    )


def _build_preflight(found: Mapping[tuple[str, str], float]) -> PreflightStatus:
    def figure(name: str, check: str = "", scale: float = 1.0) -> str | None:
        value = found.get((name, check))
        return None if value is None else _number(value * scale)

    seconds = constants.METRIC_PREFLIGHT_SECONDS
    passed = {check: found.get((constants.METRIC_PREFLIGHT_PASSED, check)) for check in _CHECKS}
    return PreflightStatus(
        failed=tuple(check for check, value in passed.items() if value == 0),
        dns_milliseconds=figure(seconds, "dns", 1e3),
        tcp_milliseconds=figure(seconds, "tcp", 1e3),
        all_reduce_milliseconds=figure(seconds, "allreduce", 1e3),
        all_reduce_megabytes_per_second=figure(constants.METRIC_ALL_REDUCE_RATE, scale=1e-6),
    )


def build_checkpoint(values: Mapping[str, float]) -> CheckpointStatus | None:
    """Return the newest checkpoint that the page names."""
    step = _whole(values.get(constants.METRIC_CHECKPOINT_STEP))
    return CheckpointStatus(step=step) if step else None


def compute_goodput(values: Mapping[str, float], wall_seconds: float) -> str | None:
    """Return the share of the wall time that moved the run forward: docs/metrics.md has the formula."""
    done, seconds = values.get(constants.METRIC_STEPS), values.get(constants.METRIC_STEP_SECONDS)
    kept = values.get(constants.METRIC_GLOBAL_STEP)
    if not done or not seconds or not kept or wall_seconds <= 0:
        return None
    share = kept * (seconds / done) / wall_seconds
    return f"{min(share, 1.0):.2f}" if math.isfinite(share) and share >= 0 else None


def format_duration(seconds: float) -> str:
    """Return a duration for a reader: 42s, 5m12s, 3h04m, 2d07h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    count = 0
    for match in _LINE.finditer(text):
        if match[1] not in _WANTED or match.end() - match.start() > _MAX_LINE:
            continue
        count += 1
        if count > _MAX_SAMPLES:
            return
        try:
            found = [s for family in text_string_to_metric_families(match[0] + "\n") for s in family.samples]
            samples = [(s.name, s.labels, float(s.value)) for s in found if s.name in _WANTED]
        except Exception:  # the parser promises nothing about garbage, and some whole numbers fit no float
            continue
        yield from samples


def _rank(labels: Mapping[str, str]) -> float:
    text = labels.get("rank", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else math.inf


def _eta(values: Mapping[str, float], steps: float | None, total: float | None) -> int | None:
    rate, samples = values.get(constants.METRIC_GLOBAL_RATE), values.get(constants.METRIC_SAMPLES)
    world = values.get(constants.METRIC_WORLD_SIZE, 1.0)
    done = values.get(constants.METRIC_STEPS)
    if not rate or not steps or not total or not samples or not done:
        return None
    # Samples a step over all ranks, from this rank's own counters since it started.
    remaining = max(total - steps, 0.0) * (samples / done) * world / rate
    return round(remaining) if 0 <= remaining < 1e9 else None


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) or abs(value) > 1e15 else int(value)


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{min(max(value, -1e15), 1e15):.0f}"


def _time(value: float | None) -> str | None:
    if value is None or not math.isfinite(value) or not 0 < value < 4e9:
        return None
    return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
