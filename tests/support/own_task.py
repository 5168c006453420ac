"""The worked example of docs/trainer.md as a module, and broken versions of it for tests."""

from __future__ import annotations

import re
from types import ModuleType

from tests.support import ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trainer.md").read_text(encoding="utf-8"), re.DOTALL)


def example() -> ModuleType:
    """The example's names; it is not run."""
    module = ModuleType("regression")
    exec(compile(EXAMPLES[0], "docs/trainer.md", "exec"), vars(module))
    return module
