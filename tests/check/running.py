"""`ddp check` as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 500  # for a whole check on a busy machine
_CODE = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"


def run_check(folder: Path, *words: str, python: str = sys.executable, paths: str = "") -> dict[str, dict[str, Any]]:
    """Check a script of a folder; return its verdicts by check.

    ``words``: the script, options, and after ``--`` the script's arguments; ``paths``: the interpreter's import path.
    """
    options = ["--cpu", "--json", "--seed=1"]
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


def list_failures(verdicts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the failed checks with their reasons."""
    return {name: verdict["reason"] for name, verdict in verdicts.items() if verdict["state"] == "failed"}
