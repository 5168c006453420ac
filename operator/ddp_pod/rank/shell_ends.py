"""The command at which a rank's bash script ends: with ``set -e`` many fail without a word."""

import os
import shlex
from typing import Final

_VARIABLE: Final = "BASH_ENV"
# Only the first script, not those that it starts; and not `bash -c`, which becomes its last command unless it has a
# trap. A script's own trap takes the place of this one.
_TRAP: Final = """\
unset BASH_ENV
case $- in *c*) ;; *) trap '{{
  case $? in 0) ;; *) printf "%s\\n%s\\n%s\\n" "$?" "${{BASH_SOURCE[0]:-$0}}" "$BASH_COMMAND" > {path} || :;; esac
}} 2>/dev/null' EXIT ;; esac
"""


def observe_shell(path: str) -> None:
    """Have the program's bash note its exit code, script and command. ``path``: of the file. Raises: OSError."""
    if _VARIABLE in os.environ or shlex.quote(path) != path:
        return
    setup = f"{path}.sh"
    with open(setup, "w", encoding="utf-8") as file:
        file.write(_TRAP.format(path=path))
    os.environ[_VARIABLE] = setup
