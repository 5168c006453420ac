"""The command at which a rank's bash script ends: with ``set -e`` many fail without a word."""

import os
import shlex
from typing import Final

from .end_notes import SHELL_PREFIX

_VARIABLE: Final = "BASH_ENV"
# Only the first script, not those that it starts; and not `bash -c`, which becomes its last command unless it has a
# trap, nor a restricted shell, which may not write. A script's own trap takes the place of this one.
# A script may see the trap, or extend it: so it is one line, calls no function of the script, and leaves `$?`, also
# under `set -e`. A limit of files must not end it. The redirections hide it from `set -x`, and the argument of the
# function keeps `$_`.
_SETUP: Final = """\
{{ {name}setup() {{
unset BASH_ENV
unset -f {name}setup
case $- in *c*) ;; *) shopt -q restricted_shell || trap '{trap}' EXIT ;; esac
}}; {name}setup "$_"; }} 2>/dev/null
"""
_TRAP: Final = (
    '{{ {name}code=$?; case ${name}code in 0) ;; *) trap "" XFSZ; '
    r'builtin printf "%s\n%s\n%s\n" "${name}code" "${{BASH_SOURCE[0]:-$0}}" "$BASH_COMMAND" >| {path} || :; '
    'trap - XFSZ; {name}end() {{ return "${name}code"; }}; {name}end && : ;; esac; }} 2>/dev/null'
)


def observe_shell(path: str) -> None:
    """Have the program's bash note its exit code, script and command. ``path``: of the file. Raises: OSError."""
    if _VARIABLE in os.environ or shlex.quote(path) != path:
        return
    setup = f"{path}.sh"
    with open(setup, "w", encoding="utf-8") as file:
        file.write(_SETUP.format(name=SHELL_PREFIX, trap=_TRAP.format(name=SHELL_PREFIX, path=path)))
    os.environ[_VARIABLE] = setup
