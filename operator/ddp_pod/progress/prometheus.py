"""Prometheus' text format: the page at ``/metrics``, and the pages of scripts that have their own exporter."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ..contract.names import LAUNCHER_PHASES
from ..contract.progress import RankProgress
from ..contract.report import PodReport, PreflightResult
from ..contract.series import (
    FIELDS,
    METRIC_ALL_REDUCE_RATE,
    METRIC_HANGS,
    METRIC_HEARTBEAT_AGE,
    METRIC_LAUNCHER_PHASE,
    METRIC_LAUNCHER_RESTARTS,
    METRIC_MEMORY_BYTES,
    METRIC_MEMORY_SAVES,
    METRIC_MEMORY_STALLED,
    METRIC_MEMORY_STEP,
    METRIC_MEMORY_TIME,
    METRIC_NETWORK,
    METRIC_PREFLIGHT_PASSED,
    METRIC_PREFLIGHT_SECONDS,
    METRIC_RESTART_STEP,
    METRIC_SLOWEST_PAIR,
    METRIC_STALLED,
    METRIC_STALLED_RANK,
    METRIC_TRACKING,
    METRIC_UPLOAD_BYTES,
    METRIC_UPLOAD_FAILURES,
    METRIC_UPLOAD_STEP,
    METRIC_UPLOAD_TIME,
    SERIES,
)

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?[ \t]+(\S+)([ \t]+-?\d+)?[ \t]*")
_RANK: Final = re.compile(r'\{rank="(\d{1,9})",?\}')
_HEADER: Final = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: (.*))?")
_SUFFIXES: Final = ("_bucket", "_sum", "_count", "_total", "_created")
_OWN_PREFIX: Final = "ddp_launcher_"


class _Family(NamedTuple):
    """A series of the launcher with its samples: their labels, and their values."""

    name: str
    help: str
    samples: Sequence[tuple[Mapping[str, object], float | None]]

    def format(self) -> list[str]:
        """Return the lines of the page; none without a value."""
        kind = "counter" if self.name.endswith("_total") else "gauge"
        rows = [_format_sample(self.name, labels, value) for labels, value in self.samples if value is not None]
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {kind}", *rows] if rows else []


def read_script_page(page: str) -> RankProgress:
    """Return the progress on a rank's own page: its known series that have no label but ``rank``.

    All values but the loss are finite.
    """
    values: dict[str, float] = {}
    rank = 0
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        name = FIELDS.get(sample[1]) if sample else None
        if sample is None or name is None or not _is_number(sample[3]):
            continue
        value = float(sample[3])
        label = _RANK.fullmatch(sample[2] or "")
        if (label is None and sample[2]) or (name != "loss" and not math.isfinite(value)):
            continue
        rank = int(label[1]) if label else rank
        values[name] = value
    progress = RankProgress(rank)
    progress.update(values)
    progress.note_lost_loss()
    return progress


def format_page(report: PodReport, script_pages: Mapping[int, str]) -> str:
    """Return the page of a pod. ``script_pages``: of the ranks with an exporter, by global rank."""
    rows: list[str] = []
    for family in _list_families(report):
        rows += family.format()
    for progress in report.ranks:
        if progress.rank not in script_pages:
            rows += _format_progress(progress)
    return merge_pages(["\n".join(rows), *script_pages.values()])


def _format_progress(progress: RankProgress) -> list[str]:
    rows = []
    for field, name in SERIES.items():
        value = getattr(progress, field)
        if field == "loss" and progress.lost_loss_step is not None:
            value = math.nan
        if value is not None:
            kind = "counter" if name.endswith(("_total", "_sum")) else "gauge"
            rows += [f"# TYPE {name} {kind}", _format_sample(name, {"rank": progress.rank}, value)]
    return rows


def _format_sample(name: str, labels: Mapping[str, object], value: float) -> str:
    # Prometheus escapes as JSON does.
    text = ",".join(f"{label}={json.dumps(str(content), ensure_ascii=False)}" for label, content in labels.items())
    return f"{name}{{{text}}} {value:.15g}" if text else f"{name} {value:.15g}"


def _list_families(report: PodReport) -> list[_Family]:
    """Return the launcher's own series."""
    phases = [({"phase": phase}, int(phase == report.phase)) for phase in LAUNCHER_PHASES] if report.phase else []
    stall = report.stall
    ranks = [({"rank": rank.rank, "state": rank.state, "what": rank.what}, 1) for rank in stall.ranks]
    runs = [({"tracker": run.tracker, "url": run.url}, 1) for run in report.runs]
    families = [
        _Family(METRIC_LAUNCHER_PHASE, "What this pod's launcher is doing; one of its series is 1.", phases),
        _single(
            METRIC_LAUNCHER_RESTARTS,
            "How often torchrun restarted the workers in this pod.",
            report.restarts if report.phase else None,
        ),
        _single(METRIC_RESTART_STEP, "Step of the run at the last restart in the same pods.", report.restart_step),
        _Family(METRIC_TRACKING, "A page of the job's run in a tracker.", runs),
        _single(
            METRIC_HANGS,
            "How often the watchdog found that no rank of this pod makes progress.",
            stall.hangs if report.phase else None,
        ),
        _single(
            METRIC_STALLED,
            "For how long this pod's ranks have made no step; only while they make none.",
            stall.seconds,
        ),
        _Family(METRIC_STALLED_RANK, "What a rank of a stalled pod does; ranks for which others wait first.", ranks),
        _single(METRIC_HEARTBEAT_AGE, "Time since a rank of this pod last made progress.", stall.heartbeat_age),
    ]
    if report.preflight is not None:
        families += _list_preflight(report.preflight)
    uploads = report.uploads
    if uploads is not None:
        families += [
            _single(METRIC_UPLOAD_STEP, "Step of the newest snapshot in checkpoint.url.", uploads.step),
            _single(METRIC_UPLOAD_TIME, "When that snapshot was complete.", uploads.time),
            _single(METRIC_UPLOAD_BYTES, "Bytes of checkpoints that were uploaded.", uploads.bytes),
            _single(METRIC_UPLOAD_FAILURES, "Uploads that failed since the last successful one.", uploads.failures),
        ]
    copies = report.memory
    if copies is not None:
        families += [
            _single(METRIC_MEMORY_STEP, "Step of the newest copy in this pod's memory.", copies.step),
            _single(METRIC_MEMORY_TIME, "When that copy was complete, in Unix seconds.", copies.time),
            _single(METRIC_MEMORY_BYTES, "Memory of all copies in this pod.", copies.bytes),
            _single(METRIC_MEMORY_SAVES, "Copies that the ranks have made since they started.", copies.saves),
            _single(METRIC_MEMORY_STALLED, "Time for which copies stopped training.", copies.stalled_seconds),
        ]
    return families


def _list_preflight(result: PreflightResult) -> list[_Family]:
    seconds = {"dns": result.dns_seconds, "tcp": result.tcp_seconds, "allreduce": result.all_reduce_seconds}
    passed = [({"check": check}, int(check not in result.failed)) for check in result.done]
    network = {"transport": result.transport, "gpu_direct": str(result.gpu_direct).lower()}
    pair = {"pods": ",".join(map(str, result.pair))}
    return [
        _Family(METRIC_PREFLIGHT_PASSED, "Whether a check before training passed.", passed),
        _Family(
            METRIC_PREFLIGHT_SECONDS,
            "The longest lookup, connection, or all-reduce of one number.",
            [({"check": check}, value) for check, value in seconds.items()],
        ),
        _single(
            METRIC_ALL_REDUCE_RATE,
            "Bus bandwidth of an all-reduce over all ranks before training.",
            result.all_reduce_rate,
        ),
        _Family(
            METRIC_NETWORK,
            "The transport that NCCL or gloo uses between pods.",
            [(network, 1 if result.transport else None)],
        ),
        _Family(
            METRIC_SLOWEST_PAIR,
            "Bandwidth of the slowest pair of pods before training, in one direction.",
            [(pair, result.pair_rate)],
        ),
    ]


def _single(name: str, text: str, value: float | None) -> _Family:
    return _Family(name, text, [({}, value)])


def merge_pages(pages: Iterable[str]) -> str:
    """Merge Prometheus pages: one HELP and TYPE per name, the first of equal series, no other lines.

    Only the first page, the launcher's own, may have series of the launcher.
    """
    families: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    seen: set[str] = set()
    for number, page in enumerate(pages):
        for line in page.splitlines():
            header = _HEADER.fullmatch(line)
            if header:
                families.setdefault(header[2], {}).setdefault(header[1], header[3] or "")
                continue
            sample = _SAMPLE.fullmatch(line)
            if not sample or not _is_number(sample[3]) or (number and sample[1].startswith(_OWN_PREFIX)):
                continue
            series = sample[1] + (sample[2] or "")
            if series not in seen:
                seen.add(series)
                samples.setdefault(_family_of(sample[1], families), []).append(line)
    lines: list[str] = []
    for name, rows in samples.items():
        headers = families.get(name, {})
        lines += [f"# {keyword} {name} {headers[keyword]}" for keyword in ("HELP", "TYPE") if keyword in headers]
        lines += rows
    return "\n".join(lines) + "\n"


def _family_of(sample: str, families: Mapping[str, object]) -> str:
    """Return the metric that a sample belongs to, such as the histogram of a ``_bucket``."""
    if sample in families:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and sample[: -len(suffix)] in families:
            return sample[: -len(suffix)]
    return sample


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
