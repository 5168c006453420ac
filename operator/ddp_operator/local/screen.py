"""What `ddp run` prints beside the state of the job: what it waits for, the ranks' lines, a remark on missing steps."""

import re
from datetime import datetime, timedelta
from typing import Final

from ddp_operator.api.status import Status
from ddp_operator.local.tail import LogFile, split_rank
from ddp_operator.progress import Page
from ddp_operator.status import conditions

_LOADING: Final = {"WaitingForMaster": "waiting for all pods", "Rendezvous": "connecting"}
# In a pod of one rank the launcher's lines and torchrun's carry no other mark.
_NOT_THE_SCRIPT: Final = re.compile(r"\[launcher\] |[IWE]\d{4} .* torch/distributed/elastic/")
_SILENCE: Final = timedelta(seconds=30)
_LOADING_SECONDS: Final = timedelta(seconds=90)
NO_STEPS: Final = """\
no step reported so far; for a bar and an ETA add two lines to the script (docs/metrics.md),
            exporter = ddp_trainer.exporter.Exporter.start(total_steps=1000)  # before the loop
            exporter.step(samples=len(batch), loss=loss)  # after each step
or describe its log lines in metrics.logPatterns of a YAML"""


def describe_wait(status: Status, page: Page, processes: int, *, spoken: bool) -> str:
    """Return in one line what the job waits for, if anything. ``spoken``: the script has printed something."""
    for kind, bad in (("Accepted", "False"), ("Restarting", "True"), ("Scheduled", "False"), ("Rendezvoused", "False")):
        found = status.condition(kind)
        if found is not None and found.status == bad and found.message:
            if found.reason != conditions.WAITING_FOR_WORKERS or page.in_place_restarts:
                return found.message.splitlines()[0]
            loading = _LOADING.get(page.launcher_phase or "", "importing torch")
            return f"starting {count(processes, 'process', 'es')}; {loading} …"
    return "" if spoken else f"{count(processes, 'process', 'es')} started; no output of the script yet"


def is_silent(status: Status, spoken: datetime | None, now: datetime) -> bool:
    """Tell whether the job has trained for a while without reporting a step.

    ``spoken``: when the script printed its first line, None: not yet; it may still import what it needs.
    """
    met = status.condition(conditions.RENDEZVOUSED)
    if status.phase != "Running" or status.progress is not None or met is None or met.status != "True":
        return False
    since = spoken or (met.last_transition_time or now) + _LOADING_SECONDS
    return now - since > _SILENCE


def format_line(line: str, file: LogFile, procs: int, ranks: str) -> str | None:
    """Return a line of a pod's log as it is shown, None: not at all. ``ranks``: all, or the number of one."""
    rank, text = split_rank(line, file.node, procs)
    if ranks == "all":
        return f"[{f'pod {file.node}' if rank is None else f'rank {rank}'}] {text}"
    return text if str(rank) == ranks and not _NOT_THE_SCRIPT.match(text) else None


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun: 1 pod, 2 pods."""
    return f"{number} {noun}{plural if number != 1 else ''}"
