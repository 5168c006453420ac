"""What a training pod's ``/metrics`` page says about progress.

The page comes from the user's pod. It is read as bytes, piece by piece; only lines with a known name are parsed, and
nothing in them can raise.
"""

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ddp_operator import constants
from ddp_operator.api.status import CheckpointStatus, PreflightStatus, Progress, SlowestPair
from ddp_operator.failures import InputReport, parse_inputs, quote
from ddp_operator.kubeobjects import truncate

_WANTED = frozenset({
    constants.METRIC_LOSS, constants.METRIC_EPOCH, constants.METRIC_EPOCHS, constants.METRIC_TOTAL_STEPS,
    constants.METRIC_PROGRESS, constants.METRIC_VAL_ACCURACY, constants.METRIC_VAL_LOSS,
    constants.METRIC_LEARNING_RATE, constants.METRIC_WORLD_SIZE, constants.METRIC_GLOBAL_RATE,
    constants.METRIC_LAST_STEP, constants.METRIC_CHECKPOINT_STEP, constants.METRIC_UPLOAD_STEP,
    constants.METRIC_UPLOAD_BYTES, constants.METRIC_UPLOAD_TIME, constants.METRIC_GLOBAL_STEP,
    constants.METRIC_SAMPLES, constants.METRIC_STEPS,
    constants.METRIC_STEP_SECONDS, constants.METRIC_DATA_SECONDS, constants.METRIC_COMPUTE_SECONDS,
    constants.METRIC_LAUNCHER_PHASE, constants.METRIC_LAUNCHER_RESTARTS,
    constants.METRIC_PREFLIGHT_PASSED, constants.METRIC_PREFLIGHT_SECONDS, constants.METRIC_ALL_REDUCE_RATE,
    constants.METRIC_NETWORK, constants.METRIC_SLOWEST_PAIR,
    constants.METRIC_HEARTBEAT_AGE, constants.METRIC_SAVING,
    constants.METRIC_STALLED, constants.METRIC_STALLED_RANK, constants.METRIC_TRACKING,
})  # fmt: skip
_PREFLIGHT = {  # by the label that tells one sample from the other
    constants.METRIC_PREFLIGHT_PASSED: "check",
    constants.METRIC_PREFLIGHT_SECONDS: "check",
    constants.METRIC_ALL_REDUCE_RATE: "",
    constants.METRIC_NETWORK: "transport",
    constants.METRIC_SLOWEST_PAIR: "pods",
}
_NAMES = {name.encode(): name for name in _WANTED}
# A line with a rank and a value only, as nearly all are, is matched as a whole; others label by label.
_PLAIN = re.compile(rb'(ddp_[a-z_]+)(?:\{rank="([0-9]{1,9})"\})? ([-+0-9.eE]{1,32})')
_NAME = re.compile(rb"ddp_[a-z_]{1,96}")
_SAMPLE = re.compile(rb"[a-z_]+(?:\{([^\n]*)\})?[ \t]+([-+0-9.eEinfINFaA]{1,32})(?:[ \t]+-?[0-9]{1,20})?[ \t\r]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(?:,|$)')
_ESCAPED = re.compile(r"\\(.)")
# Labels with free text, which may hold escapes; a value of any other series has none.
_FREE_TEXT = frozenset({constants.METRIC_STALLED_RANK, constants.METRIC_TRACKING, constants.METRIC_NETWORK})
# Lines for the operator alone: what follows each of these beginnings is read once a page.
_COMMENTS = {
    constants.COMMENT_LAST_FAILURE.encode(): 8192,
    constants.COMMENT_INPUTS.encode(): 32768,
    constants.COMMENT_UPLOAD_PROBLEM.encode(): 4096,
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
_MAX_OWN_LINES = 16384  # that begin as our names do
_MAX_COMMENTS = 64
_MAX_REST = 40960  # of a line that is not complete yet; no line that is read is longer
_MAX_INT = 2**31 - 1
# Rates are taken over so long, where there are readings for it: one step says little, and an hour ago is not now.
_RATE_WINDOW = 10.0
_MAX_READINGS = 64
_MAX_STALLED = 8  # ranks of one pod
_MAX_WORDS = 200
_MAX_TRANSPORT = 40
_MAX_LINKS = 4
_MAX_PREFLIGHT = 32
_BRACKETS = (b"{}", b"[]", b'""')


@dataclass(frozen=True, slots=True)
class RankSample:
    """What one rank has done: steps of the run, and of its process with their seconds."""

    step: float = 0.0
    steps: float = 0.0
    compute: float = 0.0
    data_wait: float = 0.0


@dataclass(frozen=True, slots=True, order=True)
class StalledRank:
    """What a rank does instead of a step, from the launcher. ``order`` puts those that are waited for first."""

    order: int
    rank: int
    what: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Steps a second, and samples a second of all ranks together, where they are known."""

    steps: float | None = None
    samples: float | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters of a rank's process at a moment. ``seconds`` is the time spent in its steps, None: not reported."""

    time: float
    steps: float | None = None
    samples: float | None = None
    seconds: float | None = None
    last_step: float | None = None
    world_size: float = 1.0


class RateMeter:
    """Derives rates from successive readings of one rank's counters."""

    def __init__(self) -> None:
        self._process: object = None
        self._readings: deque[_Reading] = deque(maxlen=_MAX_READINGS)
        self._rates: Rates | None = None

    def measure(self, process: object, values: Mapping[str, float], now: float) -> Rates | None:
        """Return the rates at this reading, None before they are known.

        ``process`` is equal for two readings as long as the counters are the same process's. Of the first one the
        rates are its averages. While no step ends the last ones stand: the next step may take long.
        """
        reading = _read_counters(values, now)
        if reading.steps is None and reading.samples is None:
            return None
        last = self._readings[-1] if self._readings else None
        if last is not None and (process != self._process or _began_anew(last, reading)):
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
            return self._rates
        self._readings.append(reading)
        return self._rates


def average_rates(values: Mapping[str, float]) -> Rates | None:
    """Return the rates of a process since its start, where it reports the time that it has spent in steps."""
    reading = _read_counters(values, 0.0)
    return None if reading.seconds is None else _derive_rates(_Reading(0.0, 0.0, 0.0, 0.0), reading)


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


def _began_anew(before: _Reading, after: _Reading) -> bool:
    pairs = ((before.steps, after.steps), (before.samples, after.samples), (before.seconds, after.seconds))
    return any(old is not None and (new is None or new < old) for old, new in pairs)


def _derive_rates(before: _Reading, after: _Reading) -> Rates | None:
    """Return the rates between two readings of a process: over its time in steps, else from last step to last step."""
    seconds = after.time - before.time
    if before.last_step is not None and after.last_step is not None and after.last_step > before.last_step:
        seconds = after.last_step - before.last_step
    if before.seconds is not None and after.seconds is not None:
        seconds = after.seconds - before.seconds

    def rate(old: float | None, new: float | None, times: float = 1.0) -> float | None:
        made = 0.0 if old is None or new is None else (new - old) * times
        found = made / seconds if seconds > 0 else 0.0
        return found if 0 < found < 1e15 else None

    # Ranks step together: those of the others are as many.
    rates = Rates(rate(before.steps, after.steps), rate(before.samples, after.samples, after.world_size))
    return None if rates == Rates() else rates


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape. ``values`` are the wanted series of the lowest rank on the page."""

    values: Mapping[str, float] = field(default_factory=dict)
    launcher_phase: str = ""
    in_place_restarts: int = 0
    preflight: PreflightStatus | None = None
    ranks: Mapping[int, RankSample] = field(default_factory=dict)
    rates: Rates | None = None
    last_failure: str = ""
    """The failure behind the pod's last restart in the same pods, as a termination message."""
    stalled: tuple[StalledRank, ...] = ()
    links: tuple[str, ...] = ()
    """Pages of the run in trackers of experiments."""
    inputs: tuple[InputReport, ...] = ()
    """Of a pod that fetches them."""
    upload_problem: str = ""
    """Why checkpoints cannot be uploaded, in the pod's words."""

    @property
    def joining(self) -> bool:
        """True while the launcher waits for the other pods, before the first step or after a restart."""
        return self.launcher_phase in ("Starting", "WaitingForMaster", "Rendezvous")

    @property
    def training(self) -> bool:
        """True where workers that run have reported a step; what a log has shown stays on the page after them."""
        step = self.values.get(constants.METRIC_GLOBAL_STEP, self.values.get(constants.METRIC_STEPS, 0.0))
        return step > 0 and not self.joining

    @property
    def began_at(self) -> int | None:
        """The step of the run at which these workers began; None: not known, or they have made no step yet."""
        step, made = self.values.get(constants.METRIC_GLOBAL_STEP), self.values.get(constants.METRIC_STEPS)
        if not self.training or step is None or not made:
            return None
        began = _whole(step - made)
        return None if began is None else max(0, began)


class PageParser:
    """Takes a page in pieces and keeps what is readable. What it keeps and how long it works is bounded."""

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
        """Read the lines that this piece completes."""
        data = b"\n" + self._rest + piece
        end = data.rfind(b"\n")
        # Of a line that is too long the beginning is kept, so that it is too long when its end comes.
        self._rest = data[end + 1 :][:_MAX_REST]
        if end > 0:
            self._read_samples(data, end)
            self._read_comments(data, end)

    def finish(self) -> Page:
        """Return what the page reports."""
        self.feed(b"\n")
        failure = self._comments.get(constants.COMMENT_LAST_FAILURE.encode(), "")
        inputs = self._comments.get(constants.COMMENT_INPUTS.encode(), "")
        problem = self._comments.get(constants.COMMENT_UPLOAD_PROBLEM.encode(), "")
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
            upload_problem=quote(problem.strip('"'), _MAX_WORDS),
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
            self._stalled.append(StalledRank(order, int(rank), quote(labels.get("what", ""), _MAX_WORDS)))

    def _take_link(self, labels: Mapping[str, str]) -> None:
        url = quote(labels.get("url", ""), _MAX_WORDS)
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


def parse_page(text: str) -> Page:
    """Return what is readable of a whole page; garbage gives an empty Page."""
    parser = PageParser()
    parser.feed(text.encode("utf-8", "replace"))
    return parser.finish()


def build_progress(
    values: Mapping[str, float], previous: Progress | None = None, rates: Rates | None = None
) -> Progress | None:
    """Return the status block for a set of series, or None where they say nothing of progress.

    The time left is that of the steps left at the rate of steps. Without a rate or a total it is left out rather than
    guessed.
    """
    # A process that has made no step yet does not say where the run stands: it may go on from a checkpoint.
    steps = values.get(constants.METRIC_GLOBAL_STEP, values.get(constants.METRIC_STEPS) or None)
    if steps is None and constants.METRIC_LOSS not in values:
        return None
    total, ratio = values.get(constants.METRIC_TOTAL_STEPS), values.get(constants.METRIC_PROGRESS)
    if ratio is None and steps is not None and total:
        ratio = steps / total
    before = previous or Progress()
    if rates is None:
        rates = Rates() if before.steps_per_second else average_rates(values) or Rates()
    step_rate = _number(rates.steps) or before.steps_per_second
    # A figure of the script's own (metrics.logPatterns) stands where its samples are not counted.
    sample_rate = rates.samples or values.get(constants.METRIC_GLOBAL_RATE)
    samples = _number(sample_rate) or before.samples_per_second
    eta = _eta(steps, total, step_rate)
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
        samples_per_second=samples,
        steps_per_second=step_rate,
        throughput=f"{samples} samples/s" if samples else f"{step_rate} steps/s" if step_rate else None,
        learning_rate=_number(values.get(constants.METRIC_LEARNING_RATE)),
        val_accuracy=_number(values.get(constants.METRIC_VAL_ACCURACY)) or before.val_accuracy,
        val_loss=_number(values.get(constants.METRIC_VAL_LOSS)) or before.val_loss,
        last_step_time=_time(last),
    )


def _build_preflight(found: Mapping[tuple[str, str], float], direct: str | None) -> PreflightStatus:
    def figure(name: str, check: str = "", scale: float = 1.0) -> str | None:
        value = found.get((name, check))
        return None if value is None else _number(value * scale)

    seconds = constants.METRIC_PREFLIGHT_SECONDS
    passed = {check: found.get((constants.METRIC_PREFLIGHT_PASSED, check)) for check in constants.PREFLIGHT_CHECKS}
    transport = next((label for name, label in found if name == constants.METRIC_NETWORK), None)
    pair = next((label for name, label in found if name == constants.METRIC_SLOWEST_PAIR), "")
    pods = re.fullmatch(r"([0-9]{1,6}),([0-9]{1,6})", pair)
    rate = figure(constants.METRIC_SLOWEST_PAIR, pair, 1e-6)
    return PreflightStatus(
        failed=tuple(check for check, value in passed.items() if value == 0),
        dns_milliseconds=figure(seconds, "dns", 1e3),
        tcp_milliseconds=figure(seconds, "tcp", 1e3),
        all_reduce_milliseconds=figure(seconds, "allreduce", 1e3),
        all_reduce_megabytes_per_second=figure(constants.METRIC_ALL_REDUCE_RATE, scale=1e-6),
        transport=quote(transport, _MAX_TRANSPORT) if transport else None,
        gpu_direct=None if direct is None else direct == "true",
        slowest_pair=SlowestPair(pods=(int(pods[1]), int(pods[2])), megabytes_per_second=rate)
        if pods and rate
        else None,
    )


def build_checkpoint(values: Mapping[str, float]) -> CheckpointStatus | None:
    """Return the newest checkpoint that the page names: of a job with checkpoint.url, what has been uploaded."""
    uploads = constants.METRIC_UPLOAD_BYTES in values
    step = _whole(values.get(constants.METRIC_UPLOAD_STEP if uploads else constants.METRIC_CHECKPOINT_STEP))
    return CheckpointStatus(step=step) if step else None


def compute_goodput(values: Mapping[str, float], wall_seconds: float, start_step: int = 0) -> str | None:
    """Return the share of the wall time that moved the run forward: docs/metrics.md has the formula.

    ``start_step`` is the step at which the job began: what a former job has done took none of its time.
    """
    done, seconds = values.get(constants.METRIC_STEPS), values.get(constants.METRIC_STEP_SECONDS)
    step = values.get(constants.METRIC_GLOBAL_STEP)
    if not done or not seconds or not step or wall_seconds <= 0:
        return None
    share = (step - start_step) * (seconds / done) / wall_seconds
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


def _parse_number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_labels(block: bytes | None, *, escapes: bool) -> Mapping[str, str] | None:
    """Return the labels of a line; None where it is not one that an exporter of ours writes."""
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
