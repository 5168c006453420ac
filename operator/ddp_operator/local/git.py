"""Read the git repository of a folder."""

import subprocess
from pathlib import Path


def ask_git(folder: Path, *words: str, seconds: float = 20.0) -> str:
    """Return the output of a git command in a folder; empty if git fails, is missing, or takes too long."""
    line = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        return subprocess.run(
            line, capture_output=True, text=True, errors="replace", timeout=seconds, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
