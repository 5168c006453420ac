"""Foreign text never controls the reader's terminal."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest

import ddp_cli
from ddp_cli.view.display import LiveRegion
from ddp_cli.view.terminal import make_printable, print_text

HOSTILE = [
    ("a\x1b[2Jb", "ab"),
    ("a\x1b]0;title\x07b", "ab"),
    ("a\x1b]8;;http://x\x1b\\b", "ab"),
    ("a\x1bPq#0\x1b\\b", "ab"),
    ("a\x1b[31mred", "ared"),
    ("a\x1b[31", "a"),
    ("a\x1bcb", "ab"),
    ("a\x9b2Jb", "a2Jb"),
    ("a\rb\x08c\x00d\x7f", "abcd"),
    ("a\u202eb\u2066c\u200bd", "abcd"),
    ("a\U000e0041\U000e007fb\xad\u061c\u3164\ufe0f\U000e0100c\ufeff\ud800", "abc"),
    ("a 403: https://me:pass@host/x?a=1&X-Amz-Signature=0f@", "a 403: https://***@host/x?a=1&X-Amz-Signature=***"),
    ("ü\t→ 数\n", "ü\t→ 数\n"),
]


@pytest.mark.parametrize(("text", "printed"), HOSTILE)
def test_control_characters_are_not_printed(text: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_text(text, end="")
    assert capsys.readouterr().out == printed


def test_colours_are_kept_if_allowed_and_reset_at_end() -> None:
    assert make_printable("\x1b[31mred\x1b[2J", colours=True) == "\x1b[31mred\x1b[0m"
    assert make_printable("\x1b[31mred\x1b[0m", colours=True) == "\x1b[31mred\x1b[0m"
    assert make_printable("plain\x1b[1A", colours=True) == "plain"
    kept = "\x1b[m\x1b[0;1;4;92mgreen\x1b[39;22;24m\x1b[0m"
    assert make_printable(kept, colours=True) == kept


@pytest.mark.parametrize(
    "code", ["8", "30;40", "31;8", "40", "2", "7", "5", "38;5;16", "38;2;0;0;0", "38:5:16", "97", "030"]
)
def test_attributes_that_may_hide_text_are_removed(code: str) -> None:
    assert make_printable(f"a\x1b[{code}mhidden\x1b[0m", colours=True) == "ahidden\x1b[0m"


def test_live_region_draws_text_without_control_sequences() -> None:
    from rich.table import Table
    from rich.text import Text

    stream = io.StringIO()
    region = LiveRegion(stream)
    table = Table("name")
    table.add_row(Text("job\x1b]0;title\x07\x1b[2J"))
    region.show(table)
    region.line("line\x1b]0;title\x07\x1b[2J")
    region.close()
    drawn = stream.getvalue()
    assert "job" in drawn
    assert "line" in drawn
    assert "\x1b]" not in drawn
    assert "\x1b[2J" not in drawn


def test_commands_print_by_one_function() -> None:
    files = sorted((Path(ddp_cli.__file__).parent / "commands").glob("*.py"))
    assert files
    bare = [
        f"{path.name}:{node.lineno}"
        for path in files
        if path.name != "probe.py"  # it runs in a pod, and prints JSON
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert bare == []
