"""The entry of the command, before any subcommand is known."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

_CODE: Final = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "ddp_cli.commands":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from ddp_cli.__main__ import main
"""


def test_interrupt_during_the_imports_ends_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
