"""Print the dependencies of the distribution with some extras, from pyproject.toml: ``requirements.py operator``.

They change less often than the sources and are installed before these, in a layer that the builder keeps. PyTorch is
left out: a step of its own installs it, because its files come from another index and have no hash.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
wanted = [
    *project["dependencies"],
    *(name for extra in sys.argv[1:] for name in project["optional-dependencies"][extra]),
]
print("\n".join(requirement for requirement in wanted if not requirement.startswith("torch")))
