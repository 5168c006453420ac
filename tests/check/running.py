"""`ddp check` as a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.check.faults import Fault

SECONDS: Final = 500  # for a whole check on a busy machine
SEED: Final = int(os.environ.get("DDP_TEST_CHECK_SEED", "0"))
"""Of the scripts' random numbers, and of the steps at which a check interrupts them."""
ROW: Final = "checked script"  # the property of a test that has a row of the table
_CODE: Final = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"

Verdicts = dict[str, dict[str, Any]]


class Judgement(NamedTuple):
    """What a check reported of a script with one fault: each must be true."""

    state: bool
    reason: bool
    line: bool
    alone: bool


def run_check(folder: Path, *words: str, python: str = sys.executable, paths: str = "") -> Verdicts:
    """Check a script of a folder; return its verdicts by check.

    ``words``: the script, options, and after ``--`` the script's arguments; ``paths``: the interpreter's import path.
    """
    options = ["--cpu", "--json", f"--seed={SEED + 1}", f"--env=SEED={SEED}"]
    environment = os.environ | {"PYTHONPATH": paths or os.pathsep.join(sys.path)}
    environment.pop("VIRTUAL_ENV", None)  # the ranks use the interpreter of the command
    ran = subprocess.run(
        [python, "-c", _CODE, "check", *options, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    try:
        document = json.loads(ran.stdout)
    except ValueError:
        raise AssertionError(f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}") from None
    return {verdict["check"]: verdict for verdict in document["checks"]}


def list_failures(verdicts: Verdicts) -> dict[str, str]:
    """Return the failed checks with their reasons."""
    return {name: verdict["reason"] for name, verdict in verdicts.items() if verdict["state"] == "failed"}


def list_alarms(verdicts: Verdicts) -> dict[str, str]:
    """Return the checks that failed or warn, with state, reason, line and remedy."""
    return {
        name: "; ".join(filter(None, (verdict[key] for key in ("state", "reason", "place", "remedy"))))
        for name, verdict in verdicts.items()
        if verdict["state"] in ("failed", "warning")
    }


def judge_report(fault: Fault, verdicts: Verdicts) -> Judgement:
    """Compare what a check has reported with what a fault must have."""
    verdict = verdicts.get(fault.check, {"state": "", "reason": "", "remedy": "", "place": ""})
    text = f"{verdict['reason']} {verdict['remedy']}"
    return Judgement(
        state=verdict["state"] == fault.state,
        reason=all(re.search(word, text) for word in fault.words)
        and not any(re.search(word, text) for word in fault.never),
        line=fault.is_reported_at(verdict["place"]),
        alone={*list_alarms(verdicts)} <= {fault.check, *fault.also},
    )


def note_row(
    record: Callable[[str, object], None],
    name: str,
    expected: str,
    verdicts: Verdicts,
    began: float,
    judgement: Judgement | None = None,
) -> None:
    """Keep a row of the table as a property of the test.

    ``began``: of ``time.monotonic()``; ``judgement``: None: nothing must be reported.
    """
    alarms = list_alarms(verdicts)
    found = "<br>".join(f"{check}: {text}" for check, text in alarms.items()) or "nothing"
    seconds = time.monotonic() - began
    wrong = [key for key, value in judgement._asdict().items() if not value] if judgement else list(alarms)
    result = f"no: {', '.join(wrong)}" if wrong else "yes"
    record(ROW, f"| {name} | {expected} | {found.replace('|', '/')} | {result} | {seconds:.0f} |")
