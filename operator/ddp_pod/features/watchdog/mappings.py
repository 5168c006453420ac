"""Keep which files the ranks map: after a bus error the process that knows it has ended."""

import time
from typing import Final

from ...base.pod import Pod, list_workers
from ...base.runtime_files import MAPPINGS
from ...base.service import Service
from ...failures.worker_failure import list_error_files
from ...rank.end_notes import MappedFile, note_path
from ...rank.mapped_files import list_mapped_files, write_mapped_files

_SECONDS_BETWEEN_LOOKS: Final = 0.5
_GROWTH: Final = 1.1  # of a process's age, from one reading to the next
_MOST_SECONDS: Final = 60.0  # between two readings


class MappedFilesKeeper(Service):
    """Writes the files that each rank maps beside its output.

    Scripts map their files early, and some fail soon after. Reading thousands of mappings takes milliseconds, so the
    pauses grow with the age of the process.
    """

    name = "mappings"

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._mapped: dict[int, list[MappedFile]] = {}  # by local rank
        self._read_at: dict[int, float] = {}  # the age of each process at its last reading, in seconds

    def run(self) -> None:
        """Read the mappings. Never returns."""
        while True:
            self.keep()
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def keep(self) -> None:
        """Read the mappings of those ranks for which it is time. One that has failed closes its files."""
        failed = list_error_files(self._pod)
        workers = [worker for worker in list_workers(self._pod) if worker.local_rank not in failed]
        self._read_at = {worker.pid: self._read_at.get(worker.pid, 0.0) for worker in workers}
        for worker in workers:
            age = time.time() - worker.started
            read_at = self._read_at[worker.pid]
            if age < min(_GROWTH * read_at, read_at + _MOST_SECONDS):
                continue
            self._read_at[worker.pid] = age
            files = list_mapped_files(worker.pid)
            if files != self._mapped.get(worker.local_rank):
                self._mapped[worker.local_rank] = files
                write_mapped_files(note_path(self._pod.runtime, worker.local_rank, MAPPINGS), files)
