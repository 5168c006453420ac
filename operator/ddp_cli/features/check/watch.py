"""Follow the records of a run while its ranks write them."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ddp_cli.features.check.recordings import parse_record
from ddp_pod.features.check.contract import SaveRecord, StepRecord

_MOST_FILES: Final = 1024  # of processes
_MOST_SAVES: Final = 10_000
_QUIET_SECONDS: Final = 45.0  # after which the launchers know which rank waits for which
_FIRST_STEP_SECONDS: Final = 180.0
_WAIT_SECONDS: Final = 60.0  # to the first step, if ranks wait for their process group


class Watch:
    """The steps and saves that the processes of a run have recorded so far.

    ``waits``: whether the launchers report that ranks wait for their process group; ``restarts``: whether ranks are
    killed, so that new processes start within the run.
    """

    def __init__(self, records: Path, clock: Callable[[], float] = time.monotonic, *, restarts: bool = False) -> None:
        self._records = records
        self._clock = clock
        self._offsets: dict[Path, int] = {}
        self._steps: Counter[str] = Counter()
        self._grown = clock()
        self._longest = 0.0
        self._start = 0.0  # seconds to the first step
        self._restarts = restarts
        self.saves: list[SaveRecord] = []
        self.waits = False

    @property
    def ranks(self) -> int:
        """Ranks that have completed a step."""
        return len({process.partition(".")[0] for process in self._steps})

    @property
    def steps(self) -> int:
        """Steps that all ranks have completed: of the process of each rank that completed the most."""
        ranks: dict[str, int] = {}
        for process, steps in self._steps.items():
            rank = process.partition(".")[0]
            ranks[rank] = max(ranks.get(rank, 0), steps)
        return min(ranks.values(), default=0)

    def read(self) -> None:
        """Read what the processes have written since the last call."""
        for path in sorted(self._records.glob("*.jsonl"))[:_MOST_FILES]:
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
                end = text.rfind(b"\n") + 1
                self._offsets[path] = self._offsets.get(path, 0) + end
                for line in text[:end].splitlines():
                    self._note(path.name, line)

    def _note(self, name: str, line: bytes) -> None:
        now = self._clock()
        if self._steps:
            self._longest = max(self._longest, now - self._grown)
        else:
            self._start += now - self._grown
        self._grown = now
        record = parse_record(line)
        if isinstance(record, StepRecord):
            self._steps[name] += 1
        elif isinstance(record, SaveRecord) and len(self.saves) < _MOST_SAVES:
            self.saves.append(record)

    def find_stall(self) -> str:
        """Return why the run makes no progress; empty if it may."""
        quiet = self._clock() - self._grown
        if self.steps:
            limit = max(_QUIET_SECONDS, 2 * self._longest, 2 * self._start if self._restarts else 0.0)
        else:
            limit = _WAIT_SECONDS if self.waits else _FIRST_STEP_SECONDS
        if quiet > limit:
            return f"no rank recorded anything for {quiet:.0f} s, after {self.steps} steps"
        return ""
