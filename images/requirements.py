"""Print the dependencies of the distribution with some extras, from pyproject.toml: ``requirements.py operator``.

.ci/lock-images resolves them into the lock files of the images. PyTorch is left out: a step of its own installs it,
because its files come from another index and have no hash. So are packages that only commands import: cel-expr-python
has 50 MiB.
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
LEFT_OUT = ("torch", "cel-expr-python", "jinja2", "rich")
print("\n".join(requirement for requirement in wanted if not requirement.startswith(LEFT_OUT)))
