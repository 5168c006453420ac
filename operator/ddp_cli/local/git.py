"""Read the git repository of a folder without running what its configuration names.

The ``.git/config`` of an unpacked archive may define programs that ``git status`` and ``git log`` start (file system
monitors, filters, signature checks). These commands run with a configuration of our own beside the repository's objects
and index; only ``rev-parse``, which starts nothing, reads the repository's.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PARTS: Final = ("--show-toplevel", "--git-path", "index", "--git-path", "objects", "HEAD")
_CONFIG: Final = """\
[core]
    repositoryformatversion = 1
[extensions]
    objectFormat = {format}
"""


def ask_git(folder: Path, command: str, *words: str, seconds: float = 20.0) -> str:
    """Return the output of a git command in a folder; empty if git fails, is missing, or takes too long."""
    parts = _run(folder, seconds, {}, "rev-parse", *_PARTS).split("\n")
    if len(parts) != 4:
        return ""
    root, index, objects, commit = parts
    if command == "rev-parse":
        return commit
    with tempfile.TemporaryDirectory(prefix="ddp-git-") as own:
        Path(own, "refs").mkdir()
        Path(own, "HEAD").write_text(f"{commit}\n", encoding="ascii")
        object_format = "sha256" if len(commit) == 64 else "sha1"
        Path(own, "config").write_text(_CONFIG.format(format=object_format), encoding="ascii")
        environment = {
            "GIT_DIR": own,
            "GIT_WORK_TREE": root,
            "GIT_INDEX_FILE": os.path.join(folder, index),
            "GIT_OBJECT_DIRECTORY": os.path.join(folder, objects),
        }
        return _run(folder, seconds, environment, command, *words)


def _run(folder: Path, seconds: float, environment: Mapping[str, str], *words: str) -> str:
    line = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        return subprocess.run(
            line,
            capture_output=True,
            env={**os.environ, **environment},
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
