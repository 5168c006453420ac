"""The page of one job as typed records: what it does and why, its life as bars, its ranks, and its settings. Pure."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from ddp_cli.features.ui.rows import State, describe_what, is_training, judge_attention, name_state
from ddp_cli.features.ui.run import PodFacts, RecordedRun
from ddp_cli.features.ui.timeline import Bar, list_bars
from ddp_cli.local.folder import choose_rate
from ddp_cli.view.why import Note, Why, explain_straggler, has_diverged
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.status import (
    ENDED_PHASES,
    Progress,
    Status,
    Straggler,
)
from ddp_operator.api.yaml_writer import format_documents
from ddp_operator.decide.pace import read_rate
from ddp_operator.features.stalls.stragglers import STRAGGLER_RATIO
from ddp_pod.contract.names import STALLED_STATES

_YAML_CHARACTERS: Final = 256 << 10
_HIDDEN_STATUS: Final = ("operatorState", "points", "profile")
_STATES: Final = {
    "Stopped": "stopped",
    "Behind": "behind its peers",
    "IO": "waits for its storage",
    "Busy": "computes",
    "Waiting": "waits for its peers",
}
_WAITING: Final = STALLED_STATES.index("Waiting")


class NextCommand(NamedTuple):
    """A command to copy, and what it does."""

    text: str
    purpose: str


class Card(NamedTuple):
    """A measured value with its name."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank, or a pod whose report was not read. Times in seconds; ``ratio``: of its own work to the median rank's."""

    rank: str
    pod: str = ""
    node: str = ""
    state: str = ""
    step: float | None = None
    seen: datetime | None = None
    step_time: float | None = None
    data: float | None = None
    compute: float | None = None
    ratio: float | None = None
    note: str = ""
    order: int = 0
    """Its place among the ranks of a stall: first those for which their peers wait."""

    @property
    def is_conspicuous(self) -> bool:
        """Whether a person must look at it: not at a rank that only waits for such a one."""
        return bool(self.note) and self.order != _WAITING

    @property
    def own(self) -> float | None:
        """The time of its own work in a step: in synchronous training, a straggler differs only here."""
        return None if self.compute is None else self.compute + (self.data or 0.0)

    @property
    def wait(self) -> float | None:
        """The part of a step that is mostly waiting for its peers."""
        if self.step_time is None or self.own is None or self.data is None:
            return None
        return max(0.0, self.step_time - self.own)


@dataclass(slots=True)
class JobPage:
    """All that the page of a run shows. ``argument``: the job in commands; empty: the run has none."""

    run: RecordedRun
    now: datetime
    why: Why | None = None
    key: str = ""
    place: str = ""
    argument: str = ""
    ranks_note: str = ""
    deleted: bool = False
    state: State = field(init=False)
    trains: bool = field(init=False)
    findings: Sequence[Note] = field(init=False)
    """What it does or why it does not, and what else a person should know, each with its remedy."""

    cards: Sequence[Card] = field(init=False)
    bars: Sequence[Bar] = field(init=False)
    ranks: Sequence[RankRow] = field(init=False)
    commands: Sequence[NextCommand] = field(init=False)

    def __post_init__(self) -> None:
        """Find what the page shows of its run."""
        run = self.run
        why = run.explain(self.now, self.why)
        self.state = name_state(run.status, why, judge_attention(run.status, why, self.now))
        if self.deleted:
            self.state = self.state._replace(word=f"{self.state.word}, deleted")
        self.trains = is_training(run.status, why)
        self.ranks = list_ranks(run)
        notes = [Note(describe_what(why), why.todo), *why.notes]
        self.findings = [_detail(note, run, self.ranks) if note.is_about_ranks else note for note in notes]
        self.cards = list_cards(run, self.now, trains=self.trains)
        self.bars = list_bars(run, self.now)
        self.commands = list(_list_commands(run, self.argument, deleted=self.deleted)) if self.argument else ()

    @property
    def status(self) -> Status:
        """The status of the job."""
        return self.run.status

    @property
    def revision(self) -> str:
        """The name of the code that `ddp submit` packed; empty: unknown."""
        code = (self.run.resource.get("spec") or {}).get("code")
        return str(code.get("revision") or "") if isinstance(code, Mapping) else ""

    @property
    def links(self) -> list[str]:
        """Addresses of the run in experiment trackers; pods report them, so others than web pages are left out."""
        links = self.status.tracking.links if self.status.tracking is not None else ()
        return [link for link in links if link.startswith(("https://", "http://"))]


def _detail(note: Note, run: RecordedRun, ranks: Sequence[RankRow]) -> Note:
    """Return the note on slow ranks with their cost, and where the slowest runs."""
    what = f"{note.what} {describe_cost(ranks)}".strip()
    return note._replace(what=what, todo=f"{locate_slowest(run)} {note.todo}".strip())


def list_cards(run: RecordedRun, now: datetime, *, trains: bool = False) -> list[Card]:
    """Return the measured values of a run that are known. ``trains``: its pace is that of now."""
    status = run.status
    progress = status.progress or Progress()
    column, unit = choose_rate(run.rows)
    mean = average(run, column)
    pace = Card("mean throughput", format_value(mean) if mean is not None else "", unit)
    if progress.throughput and trains:
        value, _, unit = progress.throughput.partition(" ")
        pace = Card("throughput now", value, unit)
    seconds = ((status.completion_time or now) - status.start_time).total_seconds() if status.start_time else None
    present = status.nodes.desired if status.phase in ENDED_PHASES else status.nodes.ready + status.nodes.succeeded
    goodput = read_rate(status.goodput)
    cards = [
        Card("step", _count(progress.step), _name_total(progress.total_steps)),
        Card("epoch", _count(progress.epoch), _name_total(progress.epochs)),
        Card("loss", _name_loss(run.rows, progress)),
        Card("val. loss", progress.val_loss or ""),
        Card("val. accuracy", progress.val_accuracy or ""),
        pace,
        Card("time left", (trains and progress.eta) or ""),
        Card("duration", format_duration(seconds) if seconds is not None else ""),
        Card("nodes", str(present), "" if status.phase in ENDED_PHASES else _name_total(status.nodes.desired)),
        Card("GPUs", str((status.usage and status.usage.gpus) or "") if status.phase not in ENDED_PHASES else ""),
        Card("restarts", str(status.restarts.all), f"attempt {status.attempt}" if status.attempt > 1 else ""),
        Card("goodput", "" if goodput is None else f"{100 * goodput:.0f}%", "of time in kept steps"),
    ]
    return [card for card in cards if card.value]


def _name_loss(rows: Sequence[Mapping[str, float]], progress: Progress) -> str:
    """Return the last loss of its chart, which has no point for one that is not a number."""
    losses = [row["loss"] for row in rows if "loss" in row]
    return progress.loss or "" if has_diverged(progress) or not losses else format_value(losses[-1])


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _name_total(number: int | None) -> str:
    return f"of {number:,}" if number else ""


def format_value(value: float) -> str:
    """Return a measured value with the digits that count."""
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.4g}"


def average(run: RecordedRun, column: str, since: float = -math.inf, until: float = math.inf) -> float | None:
    """Return the mean of a column of the rows of a run between two steps; None: it was not measured."""
    rows = [row for row in run.rows if since <= row.get("step", 0.0) <= until]
    values = [row[column] for row in rows if math.isfinite(row.get(column, math.nan))]
    return statistics.fmean(values) if values else None


def describe_cost(ranks: Sequence[RankRow]) -> str:
    """Return what the slow ranks cost the job, by the mean own work in a step; empty: not measured."""
    own = [(row.own, (row.ratio or 0.0) >= STRAGGLER_RATIO) for row in ranks if row.own is not None]
    slow = [seconds for seconds, is_slow in own if is_slow]
    others = [seconds for seconds, is_slow in own if not is_slow]
    step = max((row.step_time or 0.0 for row in ranks), default=0.0)
    if not slow or not others or not step:
        return ""
    without = step - max(slow) + max(others)
    mean = f"Since the ranks started, a step has taken {1000 * step:,.0f} ms on average"
    return f"{mean}; without slow ranks, about {1000 * without:,.0f} ms."


def locate_slowest(run: RecordedRun) -> str:
    """Return the pod and the node of the slowest rank; empty: no rank is slow, or no pod has reported it."""
    for straggler in run.status.stragglers[:1]:
        for pod in run.pods:
            ranks = pod.report.ranks if pod.report is not None else ()
            if pod.node and any(rank.rank == straggler.rank for rank in ranks):
                return f"Rank {straggler.rank} runs in pod {pod.name or pod.number} on {pod.node}."
    return ""


def _list_commands(run: RecordedRun, argument: str, *, deleted: bool) -> Iterator[NextCommand]:
    """Yield the commands for what one would do next."""
    status = run.status
    ended = status.phase in ENDED_PHASES
    yield NextCommand(f"ddp logs {argument}" + ("" if ended else " -f"), "read its log")
    yield NextCommand(f"ddp why {argument}", "explain it in a terminal")
    yield NextCommand(f"ddp report {argument}", "save this page as a file")
    if run.command:
        yield NextCommand(run.command, "run it again")
    if run.command or deleted:
        return
    if status.dev is not None:
        yield NextCommand(f"ddp rerun {argument}", "run changed code in its pods")
        yield NextCommand(f"ddp release {argument}", "end its pods")
    if not ended and status.phase == "Suspended":
        yield NextCommand(f"ddp resume {argument}", "resume it")
    elif not ended:
        yield NextCommand(f"ddp suspend {argument}", "stop it after a checkpoint")
        yield NextCommand(f"ddp scale {argument} N", "change the number of its pods")
    yield NextCommand(f"ddp delete {argument}", "delete it")


def list_ranks(run: RecordedRun) -> list[RankRow]:
    """Return the ranks of the newest attempt, those that need a look first."""
    status = run.status
    rows = [row for pod in run.pods for row in _list_pod(pod)]
    median = statistics.median([own for row in rows if (own := row.own) is not None] or [0.0])
    slow = {str(straggler.rank): straggler for straggler in status.stragglers}
    rows = [_judge_rank(row, median, slow.get(row.rank)) for row in rows]
    rows.sort(key=lambda row: (row.order, not row.note, -(row.ratio or 0.0)))
    failed = status.last_failure if status.phase == "Failed" else None
    if failed is not None:
        rows = [replace(row, note=row.note or failed.category) if row.rank == str(failed.rank) else row for row in rows]
        rows.sort(key=lambda row: row.rank != str(failed.rank))
    return rows


def _judge_rank(row: RankRow, median: float, straggler: Straggler | None) -> RankRow:
    """Return a rank with its ratio to the median rank, and why its peers wait for it."""
    ratio = row.own / median if median and row.own is not None else None
    note = row.note
    if straggler is not None:
        ratio = ratio or read_rate(straggler.ratio)
        note = note or explain_straggler(straggler.cause)
    elif ratio is not None and ratio >= STRAGGLER_RATIO:
        note = note or explain_straggler("data" if (row.data or 0.0) > (row.compute or 0.0) else "compute")
    return replace(row, ratio=ratio, note=note)


def _list_pod(pod: PodFacts) -> Iterator[RankRow]:
    index = "" if pod.number is None else str(pod.number)
    if pod.report is None or not pod.report.ranks:
        yield RankRow("", index, pod.node, pod.state)
        return
    stalled = {place.rank: place for place in pod.report.stall.ranks}
    for rank in pod.report.ranks:
        place = stalled.get(rank.rank)
        seen = rank.last_step_time
        yield RankRow(
            rank=str(rank.rank),
            pod=index,
            node=pod.node,
            state=_STATES.get(place.state, place.state) if place is not None else pod.state or pod.report.phase.lower(),
            step=rank.known_step,
            seen=datetime.fromtimestamp(seen, UTC) if seen and 0 < seen < 4e9 else None,
            step_time=_divide(rank.step_seconds, rank.steps),
            data=_divide(rank.data_seconds, rank.steps),
            compute=_divide(rank.compute_seconds, rank.steps),
            note=place.what if place is not None else "",
            order=place.order if place is not None else len(STALLED_STATES),
        )


def _divide(seconds: float | None, steps: float | None) -> float | None:
    return seconds / steps if seconds is not None and steps else None


def format_settings(resource: Mapping[str, Any], *, hide_values: bool = False) -> str:
    """Return a resource as YAML, bounded. ``hide_values``: without the values of environment variables."""
    metadata = {name: value for name, value in resource["metadata"].items() if name != "managedFields"}
    stored = resource.get("status") or {}
    status = {name: value for name, value in stored.items() if name not in _HIDDEN_STATUS}
    shown = {**resource, "metadata": metadata, "status": status}
    text = format_documents([_hide(shown) if hide_values else shown])
    if len(text) > _YAML_CHARACTERS:
        text = f"{text[:_YAML_CHARACTERS]}\n# cut here: the whole has {len(text):,} characters\n"
    return text


def _hide(value: Any) -> Any:
    """Return a value without those of environment variables: people pass a saved page on."""
    if isinstance(value, Mapping):
        hidden = {"value": "(hidden)"} if {"name", "value"} == set(value) else {}
        return {name: _hide(item) for name, item in value.items()} | hidden
    return [_hide(item) for item in value] if isinstance(value, list | tuple) else value
