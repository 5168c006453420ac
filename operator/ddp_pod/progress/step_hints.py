"""The hint for a script without visible steps: the reason, and a log pattern for the script's own lines.

The log reader writes it, and the pod's report has it as ``step_hint``. The operator's ``decide/describe`` shows it in
the condition Progressing (NoStepYet) if all pods run, no rank hangs, and the report of pod 0 can be read. There is
none with ``metrics.logPatterns``, and none if torchrun itself writes the ranks' output (``Supervisor._reads_output``).
"""

import os
import re
import time
from collections import deque
from typing import NamedTuple

from ..base.files import try_write_json
from ..base.pod import Pod, WorkerRecord
from ..base.runtime_files import STEP_HINT_FILE
from ..contract.names import PAGES
from ..rank.counters import RankCounters
from .line_steps import Count, find_counts
from .log_patterns import LogLines

_SECONDS = 15.0  # of a rank's process, after which invisible steps are reported
_SECONDS_WITHOUT_STEP = 45.0  # the same if its steps would be visible: it may still load data
_MOST_LINES = 2000  # searched for a pattern
_MOST_KEYS = 64
_LINES_TRIED = 256  # the last ones, on which a pattern is tried
_LINE_LIMIT = 512
_MOST_TRIED = 8  # patterns
# A frame of a stack: of Python, C++ (also by gdb and glog), Java. Its numbers grow, but are no steps.
_STACK_FRAME = re.compile(
    r"^\W*(frame )?#\d+\b|0x[0-9a-f]{4}|\bFile \"|\.(py|cc|cpp|cu|h|c|java|so)[:(]|^\s+(at|@) |^[IWEC]\d{4} ", re.I
)
_WORDS = re.compile(r"[A-Za-z_][A-Za-z_ ]*\W*$")  # without numbers, which change
_EXPORTER = (
    "exporter = ddp_sdk.Exporter.start(total_steps=…)  # before the loop, "
    "and exporter.step(samples=…, loss=loss)  # after each step"
)


class _Candidate(NamedTuple):
    """A number in the script's lines, and its last value. ``advances``: how often it has grown."""

    last: Count
    advances: int


class StepHint:
    """Builds the hint for rank 0 of a pod, once for each of its processes."""

    def __init__(self, pod: Pod, local_rank: int) -> None:
        self._pod = pod
        self._local_rank = local_rank
        self._lines = LogLines()
        self._searched = 0
        self._candidates: dict[str, _Candidate] = {}
        self._tried: deque[str] = deque(maxlen=_LINES_TRIED)
        self._pid: int | None = None
        self._since = 0.0
        self._is_done = False

    def feed(self, chunk: bytes) -> None:
        """Search output for numbers that grow."""
        if self._is_done:
            return
        for line in self._lines.split(chunk):
            self._searched += 1
            if self._searched > _MOST_LINES:
                return
            self._tried.append(line[:_LINE_LIMIT])
            for count in () if _STACK_FRAME.search(line) else find_counts(line):
                self._observe(count)

    def _observe(self, count: Count) -> None:
        before = self._candidates.get(count.key)
        if before is None and len(self._candidates) >= _MOST_KEYS:
            return
        grows = before is not None and count.value > before.last.value
        advances = (before.advances if before is not None else 0) + grows
        self._candidates[count.key] = _Candidate(count, advances)

    def build(self, worker: WorkerRecord | None, counters: RankCounters | None) -> str:
        """Return the hint if it is due, else an empty text."""
        if worker is None or self._is_done or self._pod.log_patterns:
            return ""
        now = time.monotonic()
        if worker.pid != self._pid:
            self._pid = worker.pid
            self._since = now
        is_visible = counters is not None and counters.is_counted
        if now - self._since < (_SECONDS_WITHOUT_STEP if is_visible else _SECONDS):
            return ""
        self._is_done = True
        if self._has_progress(counters):
            return ""
        hint = f"no step is visible: {_explain(worker, counters)}. {self._build_remedy()}"
        try_write_json(os.path.join(self._pod.runtime, STEP_HINT_FILE), {"hint": hint})
        return hint

    def _has_progress(self, counters: RankCounters | None) -> bool:
        if counters is not None and counters.shows_steps:
            return True
        folder = os.path.join(self._pod.runtime, "metrics")
        return any(os.path.exists(os.path.join(folder, f"{self._local_rank}.{kind}")) for kind in PAGES)

    def _build_remedy(self) -> str:
        pattern = self.suggest_pattern()
        if pattern:
            return f"To show progress, set spec.metrics.logPatterns: ['{pattern}'] (docs/your-script.md)"
        return f"To show progress, add two lines to the script (docs/your-script.md): {_EXPORTER}"

    def suggest_pattern(self) -> str:
        """Return a pattern for the number that is most likely the step; empty if none fits the lines so far.

        A number that restarts, as with each epoch, is no step of the run; the epoch may be shown then.
        """
        grown = [found for found in self._candidates.values() if found.advances and _WORDS.search(found.last.before)]
        grown.sort(key=_rank_candidate, reverse=True)
        patterns = (build_pattern(candidate.last) for candidate in grown[:_MOST_TRIED])
        return next(filter(self._fits, patterns), "")

    def _fits(self, pattern: str) -> bool:
        """Return whether the numbers that a pattern finds in the last lines only grow."""
        matches = filter(None, (re.search(pattern, line) for line in self._tried))
        values = [int(match[1]) for match in matches]
        return len(set(values)) > 1 and values == sorted(values)


def _rank_candidate(found: _Candidate) -> tuple[bool, bool, bool, int]:
    return not found.last.is_epoch, found.last.is_step, found.last.total is not None, found.advances


def _explain(worker: WorkerRecord, counters: RankCounters | None) -> str:
    if counters is None:
        return "metrics.autoInstrument is false"
    if worker.kind == "program" and counters.is_counted:
        return f"no optimizer of the Python processes that rank {worker.rank} has started has stepped"
    if worker.kind == "program":
        return f"rank {worker.rank} is no Python program, and has started none that imports torch.optim"
    if counters.is_recorded:
        return "the training step is recorded as a CUDA graph, whose replay calls no optimizer"
    if counters.is_counted:
        return f"no optimizer of rank {worker.rank}'s own process has stepped since its start"
    return "the script has not imported torch.optim; steps of other libraries and of child processes are not counted"


def build_pattern(count: Count) -> str:
    """Return the pattern of a number from the text before it."""
    words = _WORDS.search(count.before)
    text = words[0] if words else count.before
    # A quotation mark would end the text in a YAML.
    before = re.sub(r"[^\w\s]", _escape, text.strip())
    before = re.sub(r"\s+", r"\\s+", before) + r"\s*"
    name, name_of_total = ("epoch", "epochs") if count.is_epoch else ("step", "totalSteps")
    total = f" */ *(?P<{name_of_total}>[0-9]+)" if count.total is not None else ""
    return f"{before}(?P<{name}>[0-9]+){total}"


def _escape(match: re.Match[str]) -> str:
    return "." if match[0] in "'\"" else re.escape(match[0])
