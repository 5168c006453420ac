"""Print text from clusters, pods and files so that it cannot control the terminal.

It has no credentials of URLs. ``failures.sanitize_text`` cleans the text of pods before the status stores it.
"""

import re
import sys
from typing import Any, Final, TextIO

from ddp_operator.api.texts import INVISIBLE
from ddp_pod.contract.credentials import hide_credentials

# Colours, bold, italics and underlines. No other attribute: it may hide text (concealed, black, background colours).
_COLOUR: Final = r"(?:0?[0134]?|2[234]|3[1-69]|9[1-6])"
_COLOURS: Final = rf"\x1b\[{_COLOUR}(?:;{_COLOUR})*m"
# Escape sequences and strings, complete or truncated, and invisible characters.
_CONTROL: Final = (
    r"\x1b\[[0-?]*[ -/]*[@-~]?"
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
    rf"|[{INVISIBLE}]+"
)
_PLAIN: Final = re.compile(_CONTROL)
_COLOURED: Final = re.compile(f"({_COLOURS})|{_CONTROL}")
_RESET: Final = "\x1b[0m"


def make_printable(text: str, *, colours: bool = False) -> str:
    """Return text without control sequences. ``colours``: keep colours, and reset them at the end."""
    if not colours:
        return hide_credentials(_PLAIN.sub("", text))
    cleaned = hide_credentials(_COLOURED.sub(lambda match: match[1] or "", text))
    if "\x1b" not in cleaned or cleaned.endswith(_RESET):
        return cleaned
    return f"{cleaned}{_RESET}"


def print_manifest(text: str) -> None:
    """Print a manifest that the user has written, with its URLs as they are."""
    print(_PLAIN.sub("", text), end="")


def print_text(text: object, *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print untrusted text."""
    print(make_printable(str(text)), file=file or sys.stdout, end=end, flush=flush)


def build_console(stream: TextIO) -> Any:
    """Return a Rich console for this stream. Rich is imported here, because most commands do not need it."""
    from rich.console import Console

    class SafeConsole(Console):
        """Removes control characters from text, but not Rich's own control sequences."""

        def render(self, renderable: Any, options: Any = None) -> Any:
            """Render to segments."""
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield segment._replace(text=make_printable(segment.text, colours=True))

    return SafeConsole(file=stream)
