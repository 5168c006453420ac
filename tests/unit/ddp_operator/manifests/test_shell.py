"""Shell text as commands and words."""

from __future__ import annotations

import pytest

from ddp_operator.manifests.shell import MAX_SCRIPT, list_commands


def read(text: str) -> list[str]:
    """Return the commands; a conditional one begins with ?, and * follows a word that may become several."""
    return [
        ("?" if conditional else "") + " ".join(f"{word.text}{'*' if word.splits else ''}" for word in words)
        for words, conditional in list_commands(text)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cd /app && A=1 run 'a b' | tee log 2>&1 >>x; b &", ["cd /app", "A=1 run a b", "tee log", "b"]),
        ("a \\\n  --b \"c $D\" # e\n# f\ng#h", ["a --b c $D", "g#h"]),
        ('a $X "$@" ${Y:-"b c"} $(d "e f") "$(dirname "$0" \'g h\')/i" `j k`',
         ['a $X* $@* ${Y:-"b c"}* $(d "e f")* $(dirname "$0" \'g h\')/i `j k`*']),
        ("cat <<'END' > x && a\ntorchrun\n END \nEND\nb <<<c", ["cat", "a", "b"]),
        ("cat <<-A <<B\n1\n\tA\n2\nB\nc", ["cat", "c"]),
        ("if a; then b; elif c; then d; fi; e", ["?a", "?b", "?c", "?d", "e"]),
        ("for x in 1 2; do a $x; done; case $1 in b) c ;; esac; d", ["a $x*", "?c", "d"]),
        ("while a; do for x in 1; do b; done; done\nc", ["?a", "?b", "c"]),
        ("[ -d x ] && a && b; c || d; e ||\n f\n g", ["[ -d x ]", "?a", "?b", "c", "?d", "e", "?f", "g"]),
        ("f() { a; }; ( b; c ) | { d; }", ["f", "a", "b", "c", "d"]),
        ("exec > log 2>&1; a; exec b; c", ["exec", "a", "exec b"]),
        ("[ x ] || exit 1; a; exit; b", ["[ x ]", "?exit 1", "a", "exit"]),
        ("a \"b\\\"c\" d\\ e $'f\\'g' 'h$' i\\\nj", ["a b\"c d e f\\'g h$ ij"]),
        ("a 'b", ["a b"]),
        ('a "$(b', ["a $(b"]),
        ("", []),
    ],
)  # fmt: skip
def test_text_is_split_as_shell_does(text: str, expected: list[str]) -> None:
    assert read(text) == expected


def test_text_above_limit_has_no_commands() -> None:
    text = "a; " * (MAX_SCRIPT // 3)
    assert len(read(text)) == len(text) // 3
    assert read(text + "b; ") == []
