"""Build the README for a package index: without relative pictures and links, which exist only in a checkout."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Sets the readme of the wheel and the sdist."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Remove relative pictures, and replace relative links by their text."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
        text = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
