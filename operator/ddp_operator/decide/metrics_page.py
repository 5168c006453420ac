"""Parse the progress on a training pod's ``/metrics`` page. Pure.

The page comes from the user's pod. It is read as bytes, piece by piece; only lines with a known name are parsed, and no
content raises an exception.
"""

import json
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import CheckpointStatus, PreflightStatus, Progress, SlowestPair
from ddp_operator.api.texts import format_duration
from ddp_operator.decide.failures import InputReport, parse_inputs, sanitize_groups, sanitize_text
from ddp_pod.contract.group_facts import GroupFacts

_SERIES = frozenset({
    constants.METRIC_LOSS, constants.METRIC_EPOCH, constants.METRIC_EPOCHS, constants.METRIC_TOTAL_STEPS,
    constants.METRIC_PROGRESS, constants.METRIC_VAL_ACCURACY, constants.METRIC_VAL_LOSS,
    constants.METRIC_LEARNING_RATE, constants.METRIC_WORLD_SIZE, constants.METRIC_GLOBAL_RATE,
    constants.METRIC_LAST_STEP, constants.METRIC_CHECKPOINT_STEP, constants.METRIC_UPLOAD_STEP,
    constants.METRIC_UPLOAD_BYTES, constants.METRIC_UPLOAD_TIME, constants.METRIC_GLOBAL_STEP,
    constants.METRIC_SAMPLES, constants.METRIC_STEPS,
    constants.METRIC_STEP_SECONDS, constants.METRIC_DATA_SECONDS, constants.METRIC_COMPUTE_SECONDS,
    constants.METRIC_LAUNCHER_PHASE, constants.METRIC_LAUNCHER_RESTARTS, constants.METRIC_RESTART_STEP,
    constants.METRIC_PREFLIGHT_PASSED, constants.METRIC_PREFLIGHT_SECONDS, constants.METRIC_ALL_REDUCE_RATE,
    constants.METRIC_NETWORK, constants.METRIC_SLOWEST_PAIR,
    constants.METRIC_HEARTBEAT_AGE, constants.METRIC_SAVING,
    constants.METRIC_STALLED, constants.METRIC_STALLED_RANK, constants.METRIC_TRACKING,
})  # fmt: skip
_PREFLIGHT = {  # name -> the label that distinguishes its samples
    constants.METRIC_PREFLIGHT_PASSED: "check",
    constants.METRIC_PREFLIGHT_SECONDS: "check",
    constants.METRIC_ALL_REDUCE_RATE: "",
    constants.METRIC_NETWORK: "transport",
    constants.METRIC_SLOWEST_PAIR: "pods",
}
_NAMES = {name.encode(): name for name in _SERIES}
# Nearly all lines have a rank and a value only and are matched as a whole; the rest label by label.
_PLAIN = re.compile(rb'(ddp_[a-z_]+)(?:\{rank="([0-9]{1,9})"\})? ([-+0-9.eE]{1,32})')
_NAME = re.compile(rb"ddp_[a-z_]{1,96}")
_SAMPLE = re.compile(rb"[a-z_]+(?:\{([^\n]*)\})?[ \t]+([-+0-9.eEinfINFaA]{1,32})(?:[ \t]+-?[0-9]{1,20})?[ \t\r]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(?:,|$)')
_ESCAPED = re.compile(r"\\(.)")
# Series whose labels have free text with escapes.
_FREE_TEXT = frozenset({constants.METRIC_STALLED_RANK, constants.METRIC_TRACKING, constants.METRIC_NETWORK})
# Comment lines for the operator: prefix -> the longest text after it. Each is read once a page.
_COMMENTS = {
    constants.COMMENT_LAST_FAILURE.encode(): 8192,
    constants.COMMENT_INPUTS.encode(): 32768,
    constants.COMMENT_UPLOAD_PROBLEM.encode(): 4096,
    constants.COMMENT_UNREACHABLE.encode(): 4096,
    constants.COMMENT_STEP_HINT.encode(): 2048,
    constants.COMMENT_GROUPS.encode(): 4096,
}
_BY_RANK = {
    constants.METRIC_GLOBAL_STEP: "step",
    constants.METRIC_STEPS: "steps",
    constants.METRIC_COMPUTE_SECONDS: "compute",
    constants.METRIC_DATA_SECONDS: "data_wait",
}
_MAX_RANKS = 256  # of one pod
_MAX_SAMPLES = 4096
_MAX_LINE = 4096
_MAX_LABELS = 8  # of one line
_MAX_OWN_LINES = 16384  # with the prefix of our names
_MAX_COMMENTS = 64
_MAX_REST = 40960  # of an incomplete line; no line that is parsed is longer
_MAX_INT = 2**31 - 1
# Rates are measured over this many seconds, if there are readings: one step is too short, an hour too long.
_RATE_WINDOW = 10.0
_LATE_STEPS = 10.0  # usual steps, after which a missing one is no slow step
_MAX_READINGS = 64
_MAX_STALLED = 8  # ranks of one pod
_MAX_WORDS = 200
_MAX_PROBLEM = 300
_MAX_HINT = 500
_MAX_TRANSPORT = 40
_MAX_LINKS = 4
_MAX_PREFLIGHT = 32
_BRACKETS = (b"{}", b"[]", b'""')


@dataclass(frozen=True, slots=True)
class RankSample:
    """Counters of one rank: steps of the run, and steps of its process with their seconds."""

    step: float = 0.0
    steps: float = 0.0
    compute: float = 0.0
    data_wait: float = 0.0


@dataclass(frozen=True, slots=True, order=True)
class StalledRank:
    """The state of a rank that makes no step, from the launcher. ``order`` sorts ranks that block their peers first."""

    order: int
    rank: int
    what: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Steps per second, and samples per second of all ranks together; None: unknown."""

    steps: float | None = None
    samples: float | None = None


STALLED = Rates(0.0, 0.0)
"""The rates of a process that makes no steps any more."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Counters of a rank's process at a moment. ``seconds``: time spent in its steps, None if not reported."""

    time: float
    steps: float | None = None
    samples: float | None = None
    seconds: float | None = None
    last_step: float | None = None
    world_size: float = 1.0


class RateMeter:
    """Measures rates from successive readings of one rank's counters."""

    def __init__(self) -> None:
        self._process: object = None
        self._readings: deque[_Reading] = deque(maxlen=_MAX_READINGS)
        self._rates: Rates | None = None

    def measure(self, process: object, values: Mapping[str, float], now: float) -> Rates | None:
        """Return the rates at this reading; None: they are unknown yet.

        ``process`` is equal for two readings of the same process. The rates of the first reading are its averages.
        While no step ends the last rates remain, because a step may take long. After ten usual steps they are STALLED.
        """
        reading = _read_counters(values, now)
        if reading.steps is None and reading.samples is None:
            return None
        last = self._readings[-1] if self._readings else None
        if last is not None and (process != self._process or _has_restarted(last, reading)):
            self._readings.clear()
            last = self._rates = None
        self._process = process
        if last is None:
            self._rates = average_rates(values)
        elif (reading.steps, reading.samples) != (last.steps, last.samples):
            while len(self._readings) > 1 and now - self._readings[1].time >= _RATE_WINDOW:
                self._readings.popleft()
            self._rates = _derive_rates(self._readings[0], reading) or self._rates
        else:
            usual = self._rates.steps if self._rates is not None else None
            is_late = usual is not None and now - last.time > max(_RATE_WINDOW, _LATE_STEPS / usual)
            return STALLED if is_late else self._rates
        self._readings.append(reading)
        return self._rates


def average_rates(values: Mapping[str, float]) -> Rates | None:
    """Return the mean rates of a process since its start; None: it does not report the time spent in steps."""
    reading = _read_counters(values, 0.0)
    if reading.seconds is None:
        return None
    return _derive_rates(_Reading(0.0, 0.0, 0.0, 0.0), reading)


def _read_counters(values: Mapping[str, float], now: float) -> _Reading:
    def finite(name: str) -> float | None:
        value = values.get(name)
        return value if value is not None and math.isfinite(value) else None

    return _Reading(
        time=now,
        steps=finite(constants.METRIC_STEPS),
        samples=finite(constants.METRIC_SAMPLES),
        seconds=finite(constants.METRIC_STEP_SECONDS),
        last_step=finite(constants.METRIC_LAST_STEP),
        world_size=finite(constants.METRIC_WORLD_SIZE) or 1.0,
    )


def _has_restarted(before: _Reading, after: _Reading) -> bool:
    pairs = ((before.steps, after.steps), (before.samples, after.samples), (before.seconds, after.seconds))
    return any(old is not None and (new is None or new < old) for old, new in pairs)


def _derive_rates(before: _Reading, after: _Reading) -> Rates | None:
    """Return the rates between two readings, over the time in steps if it is reported, else between the last steps."""
    seconds = after.time - before.time
    if before.last_step is not None and after.last_step is not None and after.last_step > before.last_step:
        seconds = after.last_step - before.last_step
    if before.seconds is not None and after.seconds is not None:
        seconds = after.seconds - before.seconds

    def rate(old: float | None, new: float | None, ranks: float = 1.0) -> float | None:
        if old is None or new is None or seconds <= 0:
            return None
        value = (new - old) * ranks / seconds
        return value if 0 < value < 1e15 else None

    # Ranks step together, so every rank has processed as many samples.
    rates = Rates(rate(before.steps, after.steps), rate(before.samples, after.samples, after.world_size))
    return None if rates == Rates() else rates


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape. ``values`` are the known series of the lowest rank on the page."""

    values: Mapping[str, float] = field(default_factory=dict)
    launcher_phase: str = ""
    in_place_restarts: int = 0
    preflight: PreflightStatus | None = None
    ranks: Mapping[int, RankSample] = field(default_factory=dict)
    rates: Rates | None = None
    last_failure: str = ""
    """The failure before the last restart in the same pods, as a termination message."""
    stalled: tuple[StalledRank, ...] = ()
    links: tuple[str, ...] = ()
    """URLs of the run in experiment trackers."""
    inputs: tuple[InputReport, ...] = ()
    """Reports of a pod that fetches inputs."""
    upload_problem: str = ""
    """Why checkpoints cannot be uploaded, in the message of the pod."""
    unreachable: str = ""
    """What the pod cannot reach, in its message: pod 0 before training, or peers."""
    step_hint: str = ""
    """Why no step of the script is visible, and the remedy, in the message of the pod."""
    groups: GroupFacts | None = None
    """Whether the ranks form one process group."""

    @property
    def joining(self) -> bool:
        """True while the launcher waits for the other pods, before the first step or after a restart."""
        return self.launcher_phase in ("Starting", "WaitingForMaster", "Rendezvous")

    @property
    def completed_restarts(self) -> int | None:
        """Restarts in the same pods; None while the last one may still fail, because the workers have not joined."""
        return None if self.joining else self.in_place_restarts

    @property
    def training(self) -> bool:
        """True if running workers have reported a step. Values from a log stay on the page after a restart."""
        step = self.values.get(constants.METRIC_GLOBAL_STEP, self.values.get(constants.METRIC_STEPS, 0.0))
        return step > 0 and not self.joining

    @property
    def began_at(self) -> int | None:
        """The step of the run from which these workers started; None: unknown, or they have made no step yet."""
        step = self.values.get(constants.METRIC_GLOBAL_STEP)
        steps_of_process = self.values.get(constants.METRIC_STEPS)
        if not self.training or step is None or not steps_of_process:
            return None
        first = _whole(step - steps_of_process)
        return None if first is None else max(0, first)

    @property
    def restarted_at(self) -> int | None:
        """The step of the run at which workers were last stopped for a restart in the same pods; None: unknown."""
        step = _whole(self.values.get(constants.METRIC_RESTART_STEP))
        return None if step is None else max(0, step)


class PageParser:
    """Parses a page piece by piece and skips unreadable lines. Its memory and its work are bounded."""

    def __init__(self) -> None:
        self._rest = b""
        self._own_lines = 0
        self._samples = 0
        self._comment_lines = 0
        self._comments: dict[bytes, str] = {}
        self._chosen: dict[str, tuple[float, float]] = {}
        self._phase = ""
        self._restarts = 0
        self._preflight: dict[tuple[str, str], float] = {}
        self._direct: str | None = None
        self._by_rank: dict[int, dict[str, float]] = {}
        self._stalled: list[StalledRank] = []
        self._links: list[str] = []

    def feed(self, piece: bytes) -> None:
        """Parse the lines that this piece completes."""
        data = b"\n" + self._rest + piece
        end = data.rfind(b"\n")
        # The start of a line that is too long is kept, so that the line is still too long once it is complete.
        self._rest = data[end + 1 :][:_MAX_REST]
        if end > 0:
            self._read_samples(data, end)
            self._read_comments(data, end)

    def finish(self) -> Page:
        """Return the page."""
        self.feed(b"\n")
        failure = self._comments.get(constants.COMMENT_LAST_FAILURE.encode(), "")
        inputs = self._comments.get(constants.COMMENT_INPUTS.encode(), "")
        problem = self._comments.get(constants.COMMENT_UPLOAD_PROBLEM.encode(), "")
        unreachable = self._comments.get(constants.COMMENT_UNREACHABLE.encode(), "")
        hint = self._comments.get(constants.COMMENT_STEP_HINT.encode(), "")
        groups = self._comments.get(constants.COMMENT_GROUPS.encode(), "")
        return Page(
            {name: value for name, (_, value) in self._chosen.items()},
            self._phase,
            self._restarts,
            _build_preflight(self._preflight, self._direct) if self._preflight else None,
            {rank: RankSample(**values) for rank, values in self._by_rank.items()},
            last_failure=failure,
            stalled=tuple(sorted(self._stalled)),
            links=tuple(self._links),
            inputs=parse_inputs(inputs) if inputs else (),
            upload_problem=sanitize_text(problem.strip('"'), _MAX_WORDS),
            unreachable=sanitize_text(unreachable.strip('"'), _MAX_PROBLEM),
            step_hint=sanitize_text(_decode_text(hint), _MAX_HINT),
            groups=sanitize_groups(_decode_json(groups)),
        )

    def _read_samples(self, data: bytes, end: int) -> None:
        start = data.find(b"\nddp_", 0, end)
        while start >= 0 and self._own_lines < _MAX_OWN_LINES and self._samples < _MAX_SAMPLES:
            self._own_lines += 1
            stop = data.find(b"\n", start + 1)
            self._read_line(data, start + 1, stop)
            start = data.find(b"\nddp_", stop, end)

    def _read_line(self, data: bytes, start: int, stop: int) -> None:
        if stop - start > _MAX_LINE:
            return
        plain = _PLAIN.fullmatch(data, start, stop)
        if plain is not None:
            name = _NAMES.get(plain[1])
            if name is not None:
                self._samples += 1
                self._take(name, {"rank": plain[2].decode()} if plain[2] else {}, _parse_number(plain[3]))
            return
        match = _NAME.match(data, start, stop)
        name = _NAMES.get(match[0]) if match is not None else None
        if name is None:
            return
        self._samples += 1
        sample = _SAMPLE.fullmatch(data, start, stop)
        if sample is None:
            return
        labels = _parse_labels(sample[1], escapes=name in _FREE_TEXT)
        if labels is not None:
            self._take(name, labels, _parse_number(sample[2]))

    def _read_comments(self, data: bytes, end: int) -> None:
        start = data.find(b"\n# ddp_", 0, end)
        while start >= 0 and self._comment_lines < _MAX_COMMENTS:
            self._comment_lines += 1
            stop = data.find(b"\n", start + 1)
            line = data[start + 1 : stop][:_MAX_REST]
            for beginning, limit in _COMMENTS.items():
                text = line[len(beginning) :]
                if line.startswith(beginning) and len(text) <= limit and text[:1] + text[-1:] in _BRACKETS:
                    self._comments.setdefault(beginning, text.decode("utf-8", "replace"))
            start = data.find(b"\n# ddp_", stop, end)

    def _take(self, name: str, labels: Mapping[str, str], value: float | None) -> None:
        """Keep a sample of a known series."""
        if value is None:
            return
        if name == constants.METRIC_LAUNCHER_PHASE:
            if value == 1 and labels.get("phase") in constants.LAUNCHER_PHASES:
                self._phase = labels["phase"]
        elif name == constants.METRIC_LAUNCHER_RESTARTS:
            self._restarts = int(min(max(value, 0), _MAX_INT)) if math.isfinite(value) else 0
        elif name == constants.METRIC_STALLED_RANK:
            self._take_stalled(labels)
        elif name == constants.METRIC_TRACKING:
            self._take_link(labels)
        elif name in _PREFLIGHT:
            self._take_preflight(name, labels, value)
        else:
            self._take_number(name, _rank(labels), value)

    def _take_stalled(self, labels: Mapping[str, str]) -> None:
        rank = _rank(labels)
        state = labels.get("state")
        if math.isfinite(rank) and state in constants.STALLED_STATES and len(self._stalled) < _MAX_STALLED:
            order = constants.STALLED_STATES.index(state)
            activity = sanitize_text(labels.get("what", ""), _MAX_WORDS)
            self._stalled.append(StalledRank(order, int(rank), activity))

    def _take_link(self, labels: Mapping[str, str]) -> None:
        url = sanitize_text(labels.get("url", ""), _MAX_WORDS)
        if url.startswith(("http://", "https://")) and len(self._links) < _MAX_LINKS:
            self._links.append(url)

    def _take_preflight(self, name: str, labels: Mapping[str, str], value: float) -> None:
        if name == constants.METRIC_NETWORK:
            self._direct = labels.get("gpu_direct")
        key = name, labels.get(_PREFLIGHT[name], "")
        if key in self._preflight or len(self._preflight) < _MAX_PREFLIGHT:
            self._preflight[key] = value

    def _take_number(self, name: str, rank: float, value: float) -> None:
        known_rank = rank in self._by_rank or len(self._by_rank) < _MAX_RANKS
        if name in _BY_RANK and known_rank and math.isfinite(rank) and math.isfinite(value):
            self._by_rank.setdefault(int(rank), {})[_BY_RANK[name]] = value
        if name not in self._chosen or rank < self._chosen[name][0]:
            self._chosen[name] = (rank, value)


def _decode_json(text: str) -> object:
    """Return a JSON value of a pod; None if it is none."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _decode_text(text: str) -> str:
    """Return a JSON text of a pod; empty if it is none."""
    value = _decode_json(text)
    return value if isinstance(value, str) else ""


def parse_page(text: str) -> Page:
    """Return a whole page; one without readable lines is an empty Page."""
    parser = PageParser()
    parser.feed(text.encode("utf-8", "replace"))
    return parser.finish()


def build_progress(
    values: Mapping[str, float], previous: Progress | None = None, rates: Rates | None = None
) -> Progress | None:
    """Return the progress of a page's series; None: they report none.

    The remaining time is the number of remaining steps divided by their rate; without a rate or a total it is omitted.
    """
    # A process without a step may resume from a checkpoint: its zero is not the step of the run.
    steps = values.get(constants.METRIC_GLOBAL_STEP, values.get(constants.METRIC_STEPS) or None)
    if steps is None and constants.METRIC_LOSS not in values:
        return None
    before = previous or Progress()
    if rates is None:
        rates = Rates() if before.steps_per_second else average_rates(values) or Rates()
    step_rate = _number(rates.steps or None) or before.steps_per_second
    # The script's own value (metrics.logPatterns) is used if its samples are not counted.
    sample_rate = _number(rates.samples or values.get(constants.METRIC_GLOBAL_RATE)) or before.samples_per_second
    total = values.get(constants.METRIC_TOTAL_STEPS)
    eta = None if rates == STALLED else _eta(steps, total, step_rate)
    return Progress(
        epoch=_whole(values.get(constants.METRIC_EPOCH)),
        epochs=_whole(values.get(constants.METRIC_EPOCHS)),
        step=_whole(steps),
        total_steps=_whole(total),
        percent=_format_percent(values, steps, total),
        eta_seconds=eta,
        eta=None if eta is None else format_duration(eta),
        loss=_number(values.get(constants.METRIC_LOSS)),
        samples_per_second=sample_rate,
        steps_per_second=step_rate,
        throughput=None if rates == STALLED else _format_throughput(sample_rate, step_rate),
        learning_rate=_number(values.get(constants.METRIC_LEARNING_RATE)),
        val_accuracy=_number(values.get(constants.METRIC_VAL_ACCURACY)) or before.val_accuracy,
        val_loss=_number(values.get(constants.METRIC_VAL_LOSS)) or before.val_loss,
        last_step_time=_time(values.get(constants.METRIC_LAST_STEP)),
    )


def advance_progress(progress: Progress, step: int) -> Progress:
    """Return the progress at a later step, which another source than the page reports."""
    percent = _format_percent({}, step, progress.total_steps) or progress.percent
    return msgspec.structs.replace(progress, step=step, percent=percent)


def _format_percent(values: Mapping[str, float], steps: float | None, total: float | None) -> str | None:
    ratio = values.get(constants.METRIC_PROGRESS)
    if ratio is None and steps is not None and total:
        ratio = steps / total
    if ratio is None or not math.isfinite(ratio):
        return None
    return f"{100 * min(max(ratio, 0.0), 1.0):.1f}%"


def _format_throughput(sample_rate: str | None, step_rate: str | None) -> str | None:
    if sample_rate:
        return f"{sample_rate} samples/s"
    return f"{step_rate} steps/s" if step_rate else None


def _build_preflight(samples: Mapping[tuple[str, str], float], gpu_direct: str | None) -> PreflightStatus:
    """Return the preflight of its samples by name and label."""

    def measure(name: str, label: str = "", scale: float = 1.0) -> str | None:
        value = samples.get((name, label))
        return None if value is None else _number(value * scale)

    passed = {check: samples.get((constants.METRIC_PREFLIGHT_PASSED, check)) for check in constants.PREFLIGHT_CHECKS}
    transport = next((label for name, label in samples if name == constants.METRIC_NETWORK), None)
    pair_label = next((label for name, label in samples if name == constants.METRIC_SLOWEST_PAIR), "")
    pair_rate = measure(constants.METRIC_SLOWEST_PAIR, pair_label, 1e-6)
    pods = re.fullmatch(r"([0-9]{1,6}),([0-9]{1,6})", pair_label)
    slowest_pair = None
    if pods and pair_rate:
        slowest_pair = SlowestPair(pods=(int(pods[1]), int(pods[2])), megabytes_per_second=pair_rate)
    return PreflightStatus(
        failed=tuple(check for check, value in passed.items() if value == 0),
        dns_milliseconds=measure(constants.METRIC_PREFLIGHT_SECONDS, "dns", 1e3),
        tcp_milliseconds=measure(constants.METRIC_PREFLIGHT_SECONDS, "tcp", 1e3),
        all_reduce_milliseconds=measure(constants.METRIC_PREFLIGHT_SECONDS, "allreduce", 1e3),
        all_reduce_megabytes_per_second=measure(constants.METRIC_ALL_REDUCE_RATE, scale=1e-6),
        transport=sanitize_text(transport, _MAX_TRANSPORT) if transport else None,
        gpu_direct=None if gpu_direct is None else gpu_direct == "true",
        slowest_pair=slowest_pair,
    )


def build_checkpoint(values: Mapping[str, float]) -> CheckpointStatus | None:
    """Return the newest checkpoint on the page; with checkpoint.url, the newest uploaded one."""
    uploads = constants.METRIC_UPLOAD_BYTES in values
    step = _whole(values.get(constants.METRIC_UPLOAD_STEP if uploads else constants.METRIC_CHECKPOINT_STEP))
    return CheckpointStatus(step=step) if step else None


def compute_goodput(values: Mapping[str, float], wall_seconds: float, start_step: int = 0) -> str | None:
    """Return the share of the wall time in which steps were made that the run keeps: docs/metrics.md has the formula.

    ``start_step``: the step from which the job started; steps of a former job took none of its time.
    """
    steps = values.get(constants.METRIC_STEPS)
    seconds = values.get(constants.METRIC_STEP_SECONDS)
    run_step = values.get(constants.METRIC_GLOBAL_STEP)
    if not steps or not seconds or not run_step or wall_seconds <= 0:
        return None
    share = (run_step - start_step) * (seconds / steps) / wall_seconds
    return f"{min(share, 1.0):.2f}" if math.isfinite(share) and share >= 0 else None


def _parse_number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_labels(block: bytes | None, *, escapes: bool) -> Mapping[str, str] | None:
    """Return the labels of a line; None: our exporters do not write such a line."""
    text = (block or b"").decode("utf-8", "replace")
    if "\\" in text and not escapes:
        return None
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None or len(labels) == _MAX_LABELS:
            return None
        labels[match[1]] = _ESCAPED.sub(_unescape, match[2]) if escapes else match[2]
        position = match.end()
    return labels


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _rank(labels: Mapping[str, str]) -> float:
    text = labels.get("rank", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else math.inf


def _eta(steps: float | None, total: float | None, steps_per_second: str | None) -> int | None:
    if not steps or not total or not steps_per_second:
        return None
    rate = float(steps_per_second)
    remaining = max(total - steps, 0.0) / rate if rate > 0 else math.inf
    return round(remaining) if 0 <= remaining < 1e9 else None


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) or abs(value) > 1e15 else int(value)


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{min(max(value, -1e15), 1e15):.0f}"


def _time(value: float | None) -> datetime | None:
    if value is None or not math.isfinite(value) or not 0 < value < 4e9:
        return None
    return truncate(datetime.fromtimestamp(value, UTC))
