"""Find the steps of a run in the lines of any training loop, validated by the rank's own counter.

A number in a line that advances with the counter is the step, in optimizer steps or in a multiple of them such as
samples; the M of an ``N/M`` beside it is its total. A number called epoch that advances once in a number of steps is
the epoch. Nothing else in a line is believed.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..contract.numbers import parse_count
from .rank_progress import STEP_SHARE, STEP_SLACK

_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# An integer that may be a count, and the total beside it. Times, versions, percentages and decimals are none.
_COUNT = re.compile(
    r"(?<![\w.:%/-])(?P<count>\d{1,12})(?: ?(?:/|of|out of) ?(?P<total>\d{1,12}))?(?!\w|\.\d|:\d|-\d|/\d| ?%)"
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ANY_NUMBER = re.compile(_NUMBER)
_NOT_ASCII = re.compile(r"[^\x20-\x7e]+")
_SPACES = re.compile(r"\s+")
_STEP_LABEL = re.compile(r"(?<![a-z])(?:step|iter|iteration|it|batch|update|i)s?[^\w#]*$", re.IGNORECASE)
_EPOCH_LABEL = re.compile(r"(?<![a-z])(?:epoch|ep)s?[^\w#]*$", re.IGNORECASE)
_OTHER_LABEL = re.compile(
    r"(?<![a-z])(?:seed|rank|world|size|gpus?|workers?|threads?|pid|port|line|eta|time|total)[^\w#]*$", re.I
)
_VALIDATION = re.compile(r"\b(?:val|valid|validation|test|testing|eval|evaluat\w+)\b", re.IGNORECASE)
_LINE_LIMIT = 512
_MOST_COUNTS = 12  # in a line
_MOST_STREAMS = 128
_CONTEXT = 48  # characters before a number that distinguish it from others
_SHARE = 0.1  # of the counted steps by which lines may be late
_SURE_STEPS = 5.0  # from which a number that advances as much is no coincidence
_SURE_ADVANCES = 2
_LEAST_MULTIPLE = 1.5
_SURE_EPOCHS = 20.0  # of which one more or less is no matter


class StepPosition(NamedTuple):
    """The position of the run. ``step``, ``total``: in optimizer steps; ``margin``: by which the total may be off.

    ``epoch``: from 1. None: unknown. ``is_full``: whether the last count of the lines is complete, as ``20/20``.
    """

    step: float
    total: float | None
    epoch: float | None
    epochs: float | None
    margin: float = 0.0
    is_full: bool = False


class Count(NamedTuple):
    """A number of a line. ``before``: the text before it; ``key``: the end of that text, without digits."""

    before: str
    key: str
    value: float
    total: float | None

    @property
    def is_step(self) -> bool:
        """Whether its name is that of a step."""
        return bool(_STEP_LABEL.search(self.key))

    @property
    def is_epoch(self) -> bool:
        """Whether its name is that of an epoch."""
        return bool(_EPOCH_LABEL.search(self.key))


class NumberSeries:
    """The values of one number in successive lines, beside the rank's counter. ``key``: the text before it."""

    def __init__(self, key: str) -> None:
        self.is_epoch = bool(_EPOCH_LABEL.search(key))
        self.is_step = bool(_STEP_LABEL.search(key))
        self.value = 0.0
        self.first = 0.0
        self.total: float | None = None
        self.restarts = 0  # how often the number restarted, as with each epoch
        self.advances = 0
        self._counter: float | None = None  # of the last line
        self._is_full = False
        self._reached_at: float | None = None  # the counter at the first line whose number is the total
        self._base_value = 0.0  # of the last line in which both had advanced, or the number had restarted
        self._base_counter = 0.0
        self._gain = 0.0  # of the value while both advanced
        self._steps = 0.0  # of the counter meanwhile
        self._most_ahead = -math.inf  # of the counter; a line is late, never early
        self.largest_gain = 1.0  # between two lines

    def observe(self, value: float, total: float | None, counter: float) -> None:
        """Record the number of a line. ``counter``: the rank's steps when the line was read.

        A line may be printed twice, and several lines may be read at once: the number and the counter then advance in
        turn, and are compared where both have.
        """
        if self._counter is None:
            self.first = value
        else:
            self.restarts += value < self.value
            self.largest_gain = max(self.largest_gain, value - self.value)
        is_advance = value > self._base_value and counter > self._base_counter
        if is_advance and self._counter is not None and value >= self.value:
            self.advances += 1
            self._gain += value - self._base_value
            self._steps += counter - self._base_counter
        if is_advance or self._counter is None or value < self.value:
            self._base_value = value
            self._base_counter = counter
        self.value = value
        self._is_full = total is not None and value in (total, total - (self.first == 0))
        self.total = total if total is not None and total >= value else None
        if self.total is not None and self._is_last_index(value, self.total, counter):
            self.total += 1
        self._counter = counter
        self._most_ahead = max(self._most_ahead, value - counter)

    def _is_last_index(self, value: float, total: float, counter: float) -> bool:
        """Return whether the number counts from 0 and its total is the last one, as in ``iteration 59/59`` of 60.

        A number of completed parts reaches its total only when nothing follows.
        """
        if self.first != 0 or value != total:
            return False
        if self._reached_at is None:
            self._reached_at = counter
        return counter > (self._reached_at + 1 if self.is_epoch else total)

    def is_full(self, counter: float) -> bool:
        """Return whether the number has reached its total, or the last index before it, and no step has followed."""
        return self._is_full and counter <= (self._counter or 0.0) + STEP_SLACK

    @property
    def total_may_be_index(self) -> bool:
        """Whether the number is called epoch and counts from 0, so that its total may be the last one."""
        return self.is_epoch and self.first == 0 and not self.reaches_total

    @property
    def reaches_total(self) -> bool:
        """Whether the number counts from 0 and has been equal to its total."""
        return self._reached_at is not None

    @property
    def scale(self) -> float | None:
        """How much the number grows in one optimizer step; None: it does not follow the counter."""
        if not self.advances and not self.restarts and self.is_step and self.value == self._counter:
            # A short run, all of whose lines were read at once.
            return 1.0 if self.value - self.first >= _SURE_STEPS else None
        if not self._gain or not self._steps or self.restarts > self.advances:
            return None
        error = abs(self._gain - self._steps)
        is_exact = not error and (self.advances > 1 or self._steps >= _SURE_STEPS)
        is_close = error <= 1.0 + _SHARE * self._steps and self._steps >= _SURE_STEPS and self.advances > 1
        if is_exact or is_close:
            return 1.0
        return self._find_other_scale(self._gain / self._steps)

    def _find_other_scale(self, scale: float) -> float | None:
        """Return the scale of an epoch, or of a count of samples or of parts of a batch."""
        if self.is_epoch and scale < 1.0:
            return scale
        is_named = self.total is not None or self.is_step
        if scale <= _LEAST_MULTIPLE or not is_named or self.advances <= _SURE_ADVANCES:
            return None
        # A line may be read a step late, in each epoch anew; and the samples of a step are a whole number.
        whole = round(scale)
        error = STEP_SLACK * (1 + self.restarts) * scale / self._steps
        return float(whole) if abs(scale - whole) <= error else scale

    @property
    def may_be_epoch(self) -> bool:
        """Whether a number without a name, before the step, may count epochs, as in ``[0/25][10/100]``."""
        scale = self.scale
        return self.first <= 1 and (scale is None or scale < 1.0)

    def find_offset(self, scale: float) -> float:
        """Return by how many optimizer steps the run is ahead of the counter; 0 if it may have started at 0."""
        ahead = self._most_ahead if scale == 1.0 else self.value - scale * (self._counter or 0.0)
        return ahead / scale if ahead > max(1.0, STEP_SLACK * scale) else 0.0


class LineSteps:
    """Finds the position of one rank's process in its lines.

    ``epochs``, ``steps``: of the run, by the job or by an option of the script's command.
    """

    def __init__(self, epochs: float | None = None, steps: float | None = None) -> None:
        self._epochs = epochs
        self._planned = steps
        self._streams: OrderedDict[tuple[str, float | None], NumberSeries] = OrderedDict()
        self._step: NumberSeries | None = None  # of the last validated line
        self._epoch: NumberSeries | None = None  # beside it
        self._repeats = 1.0  # of all epochs, as in cross-validation
        self.epoch_base: float | None = None  # 0 or 1, with which the script starts to count epochs

    def read(self, line: str, counter: float, epoch: int | None = None) -> bool:
        """Search a line. ``epoch``: of its sampler, from 1. Returns whether it has a validated step or epoch."""
        streams = [self._observe(count, counter) for count in find_counts(line)]
        steps = [stream for stream in streams if not stream.is_epoch and stream.scale is not None]
        epochs = [stream for stream in streams if stream.is_epoch]
        if steps:
            self._step = max(steps, key=_rank_stream)
            unnamed = [stream for stream in streams[: streams.index(self._step)] if stream.may_be_epoch]
            self._epoch = next(iter(epochs or unnamed), None)
            self._repeats = self._find_repeats(streams)
            self._find_epoch_base(epoch)
            return True
        valid = [stream for stream in epochs if stream.scale is not None]
        if valid and (self._step is None or not self._step.advances):
            self._epoch = valid[0]
            self._find_epoch_base(epoch)
            return True
        return False

    def _find_repeats(self, streams: Sequence[NumberSeries]) -> float:
        """Return the total of a number before the epoch, as in ``Fold 1/5 Epoch 2/3``; 1 without one."""
        before = streams[: streams.index(self._epoch)] if self._epoch is not None else ()
        outer = [stream for stream in before if stream is not self._step and stream.may_be_epoch and stream.total]
        return (outer[0].total if outer else None) or 1.0

    def _find_epoch_base(self, epoch: int | None) -> None:
        """Compare the shown epoch with the sampler's: a line is late, never early."""
        if self._epoch is None or (epoch is None and self.epoch_base is not None):
            return
        base = self._epoch.first if epoch is None else self._epoch.value - epoch + 1
        if base in (0.0, 1.0):
            self.epoch_base = max(base, self.epoch_base or 0.0)

    def _observe(self, count: Count, counter: float) -> NumberSeries:
        key = count.key, count.total  # a validation's bar has another total
        stream = self._streams.pop(key, None) or NumberSeries(count.key)
        self._streams[key] = stream
        if len(self._streams) > _MOST_STREAMS:
            self._streams.popitem(last=False)
        stream.observe(count.value, count.total, counter)
        return stream

    def find_position(self, counter: float, first_step: float | None) -> StepPosition | None:
        """Return the position at a count of the rank's steps; None: no line has shown it.

        ``first_step``: the run's step before the rank's first one, by its optimizer.
        """
        stream = self._step or self._epoch
        scale = None if stream is None else stream.scale
        if stream is None or scale is None:
            return None
        epoch, epochs = self._find_epoch()
        is_of_epoch = stream is self._step and self._counts_in_epoch(stream, epochs)
        offset = first_step or self._find_offset(stream, scale, is_of_epoch)
        step = counter + offset
        total = self._find_total(stream, scale, epochs, is_of_epoch)
        if total is not None and step > total + max(STEP_SLACK, STEP_SHARE * total):
            total = None  # it was of another number
        margin = 0.0 if scale == 1.0 else stream.largest_gain / scale
        total = total if total is None else max(step, total)
        return StepPosition(step, total, epoch, epochs, margin, stream.is_full(counter))

    @property
    def last_step(self) -> float | None:
        """The step that the last validated line shows, if it counts optimizer steps of the process.

        A number with a total may be a bar's, which shows a new loss beside an old step, or that of an epoch.
        """
        is_exact = self._step is not None and self._step.scale == 1.0 and self._step.total is None
        return self._step.value if self._step is not None and is_exact and not self._step.restarts else None

    def _find_epoch(self) -> tuple[float | None, float | None]:
        """Return the current epoch, from 1, and their number."""
        if self._epoch is None:
            return None, self._epochs
        first = 1.0 if self.epoch_base is None else self.epoch_base
        return self._epoch.value + 1.0 - first, self._find_epochs(self._epoch)

    def _find_epochs(self, epoch: NumberSeries) -> float | None:
        """Return the number of epochs; None while ``Epoch 0/2`` may be the first of two or of three.

        A script that counts the steps of an epoch from 0 as well counts both in the same way.
        """
        total = epoch.total
        if total is None or not epoch.total_may_be_index:
            return total or self._epochs
        if self._epochs in (total, total + 1):
            return self._epochs
        step = self._step
        if step is not None and step.first == 0 and step.total is not None and step.restarts:
            return total + step.reaches_total
        return total if total >= _SURE_EPOCHS else None

    def _counts_in_epoch(self, stream: NumberSeries, epochs: float | None) -> bool | None:
        """Return whether the number restarts with each epoch; None: that is unknown before the second epoch."""
        if stream.restarts:
            return True
        if self._epoch is None or epochs == 1:
            return False
        if self._epoch.value > self._epoch.first:
            return False
        if not stream.total or not epochs:
            return None
        # In the first epoch of several, a share of the total beyond the epoch's cannot be one of the run.
        is_first = self._epoch.first <= 1
        return True if is_first and stream.value / stream.total > 1.5 / stream.total + 1 / epochs else None

    def _find_offset(self, stream: NumberSeries, scale: float, is_of_epoch: bool | None) -> float:
        if stream is self._epoch or not is_of_epoch:
            return stream.find_offset(scale)
        if self._epoch is None or not stream.total:
            return 0.0
        # The process may have started in a later epoch. Most scripts count from 1.
        base = 1.0 if self.epoch_base is None else self.epoch_base
        return max(0.0, self._epoch.first - base) * stream.total / scale

    def _find_total(
        self, stream: NumberSeries, scale: float, epochs: float | None, is_of_epoch: bool | None
    ) -> float | None:
        if stream is self._epoch:
            return epochs / scale if epochs else self._planned
        if stream.total is None or is_of_epoch is None:
            return self._planned
        # The last step of an epoch may have a smaller batch: DataLoader keeps it by default.
        steps = math.ceil(stream.total / scale)
        if not is_of_epoch:
            return self._repeats * steps
        return self._repeats * epochs * steps if epochs else self._planned


def _rank_stream(stream: NumberSeries) -> tuple[bool, bool, int]:
    """Return what makes a stream more likely the step than another one of the same line."""
    return stream.is_step and stream.scale == 1.0, stream.total is not None, stream.advances


def find_counts(line: str) -> Iterator[Count]:
    """Yield the numbers of a line that may be counts, up to the name of a validation."""
    text = _SPACES.sub(" ", _NOT_ASCII.sub(" ", _THOUSANDS.sub("", line[:_LINE_LIMIT])))
    for number, match in enumerate(_COUNT.finditer(text)):
        if number >= _MOST_COUNTS:
            return
        before = text[: match.start()]
        if _VALIDATION.search(before):
            return
        if _OTHER_LABEL.search(before):
            continue
        key = _ANY_NUMBER.sub("#", before)[-_CONTEXT:].strip()
        total = match["total"]
        yield Count(before, key, float(match["count"]), float(total) if total else None)


_VALIDATION_NAMES = ("val", "valid", "validation", "eval", "test")
_PAIR = re.compile(
    rf"(?P<name>[A-Za-z][A-Za-z_/ -]{{0,24}}?)['\"]?(?:\s*[:=]\s*|\s+)['\"]?(?P<value>{_NUMBER}|nan|-?inf)(?![\w:])"
)
_NAME_SEPARATORS = re.compile(r"[^a-z]+")
_WHOLE_NAMES = {"loss", "total", "train", "training", "avg", "average", "mean", "overall", "sum", *_VALIDATION_NAMES}


def find_metrics(line: str) -> dict[str, float]:
    """Return the metrics that a line names, by their fields of RankProgress."""
    metrics: dict[str, float] = {}
    parts = set()  # metrics that are one of several parts, as far as the line shows
    for match in _PAIR.finditer(line[:_LINE_LIMIT]):
        field = _find_field(match["name"])
        if field is None or (field in metrics and (field not in parts or _is_part(match["name"]))):
            continue
        value = float(match["value"].replace("_", ""))
        is_percent = field == "val_accuracy" and math.isfinite(value) and value > 1.0
        metrics[field] = value / 100.0 if is_percent else value
        parts.discard(field)
        if _is_part(match["name"]):
            parts.add(field)
    return metrics


def _is_part(name: str) -> bool:
    """Return whether a loss has a name of its own, as ``contrastive_loss``, which may be a part of the loss."""
    return not _WHOLE_NAMES.issuperset(filter(None, _NAME_SEPARATORS.split(name.lower())))


def _find_field(name: str) -> str | None:
    """Return the field of a metric's name such as ``train_loss``, ``val loss`` or ``lr``; None for any other."""
    words = _NAME_SEPARATORS.split(name.lower())
    if len(words) > 1 and words[-2:] in (["loss", "step"], ["loss", "batch"]):
        words = words[:-1]
    joined = "".join(words)
    is_validation = any(word in _VALIDATION_NAMES for word in words)
    if words[-1] == "loss" or joined.endswith("loss"):
        return "val_loss" if is_validation or joined.startswith("val") else "loss"
    if words[-1] == "lr" or joined.endswith("learningrate"):
        return "learning_rate"
    if is_validation and words[-1] in ("acc", "accuracy"):
        return "val_accuracy"
    return None


_EPOCHS = re.compile(r"(?:\w+\.)*(?:num[-_])?(?:train[-_])?(?:max[-_])?epochs?", re.IGNORECASE)
_STEPS = re.compile(r"(?:\w+\.)*(?:max|total|train)[-_]?(?:train[-_])?(?:steps|iters|updates?)", re.IGNORECASE)


def find_total(command: Sequence[str], *, epochs: bool) -> int | None:
    """Return the epochs, or the steps, of the run if an option of the script's command sets them.

    The command of a shell (``bash -c "python train.py --epochs 3"``) is searched too, and options without dashes, as
    Hydra has them (``trainer.max_epochs=3``).
    """
    pattern = _EPOCHS if epochs else _STEPS
    words = [word.strip("'\"") for text in command for word in text.split()]
    total = None
    for index, word in enumerate(words):
        flag, sign, value = word.partition("=")
        value = value if sign else "".join(words[index + 1 : index + 2])
        is_option = (sign or flag.startswith("-")) and pattern.fullmatch(flag.lstrip("-+"))
        number = parse_count(value)
        if is_option and number is not None and 0 < number < 2**31:
            total = number
    return total
