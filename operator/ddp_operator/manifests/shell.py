"""Split shell text into commands and words, in linear time and without running anything.

Variables and substitutions are not expanded: the result is what the text states.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_SEPARATOR: Final = re.compile(
    r"(?P<space>(?:[ \t\r]|\\\n)+|#[^\n]*)|(?P<redirect>[0-9]*(?:<<<|<<-?|[<>][&>|]?)|&>>?)"
    r"|(?P<end>\n|;;?&?|&&|\|[|&]?|[&()])"
)
_WORD_ENDS: Final = frozenset(" \t\r\n;&|()<>")
_PLAIN: Final = re.compile(r"[^\s;&|()<>'\"\\$`]+")
_SIMPLE: Final = re.compile(_PLAIN.pattern + r"(?=[\s;&|()<>]|\Z)")
_EXPANSION: Final = re.compile(r"\$(?:[({]|\w+|[@*#?$!-])|`")
_LITERAL: Final = re.compile(r"\$?'(?:(?<=\$')(?:[^'\\]|\\.)*+|[^']*)'?|\\.?", re.DOTALL)
_ESCAPE: Final = re.compile(r'\\([$`"\\])|\\\n')
_SPECIAL: Final = re.compile(r"[\\'\"`(){}]|\$[({]")
_CLOSERS: Final = {"(": ")", "$(": ")", "${": "}", '"': '"', "`": "`"}
_CONDITIONS: Final = ("if", "while", "until", "case")
_LOOPS: Final = ("for", "select")
_ENDS: Final = ("fi", "esac", "done")
_KEYWORDS: Final = ("then", "else", "elif", "do", "{", "}", "!")
_CONTINUED: Final = ("|", "|&", "||", "&&")  # a line that ends with one continues
_TESTS: Final = ("[", "[[", "test", "((")


MAX_SCRIPT: Final = 16 << 10
"""Characters of a text that is read; a longer one counts as one without commands. The launcher in the pod observes
what it does."""


class Word(NamedTuple):
    """A word without its quotes. ``start`` and ``end``: its place in the text."""

    text: str
    start: int
    end: int
    expands: bool = False
    """Whether the shell replaces a part of it."""
    splits: bool = False
    """Whether it may become several words, or none."""


class Command(NamedTuple):
    """A simple command. ``conditional``: it may not run."""

    words: list[Word]
    conditional: bool


def list_commands(text: str) -> Iterator[Command]:
    """Yield the commands of shell text, up to an unconditional exec or exit."""
    blocks: list[str] = []
    conditions = 0
    guarded = False
    words: list[Word] = []
    for item in read_items(text):
        if isinstance(item, Word):
            words.append(item)
            continue

        words, opened, closed = _strip_keywords(words) if words else ([], [], 0)
        for keyword in opened:
            blocks.append(keyword)
            conditions += keyword in _CONDITIONS
        for _ in range(min(closed, len(blocks))):
            conditions -= blocks.pop() in _CONDITIONS
        first = words[0].text if words else ""
        if words:
            yield Command(words, conditional=guarded or conditions > 0)
        if first in ("exec", "exit") and len(words) + (first == "exit") > 1 and not guarded and not blocks:
            return
        if item == "||" or (item == "&&" and first in _TESTS):
            guarded = True
        elif item not in ("&&", "|", "|&", "(", ")"):
            guarded = False
        words = []


def _strip_keywords(words: list[Word]) -> tuple[list[Word], list[str], int]:
    """Return a command without leading keywords, the blocks that they open, and the number that they close."""
    opened = []
    closed = 0
    for index, word in enumerate(words):
        if word.text in _CONDITIONS or word.text in _LOOPS:
            opened.append(word.text)
            if word.text in ("case", *_LOOPS):
                return [], opened, closed
        elif word.text in _ENDS:
            closed += 1
        elif word.text not in _KEYWORDS:
            return words[index:], opened, closed
    return [], opened, closed


def read_items(text: str) -> Iterator[Word | str]:
    """Yield words, and the operators that end a command. Redirections and here-documents are left out."""
    if len(text) > MAX_SCRIPT:
        yield "\n"
        return
    position = 0
    redirect = ""
    last = ""
    delimiters: list[str] = []
    while position < len(text):
        separator = _SEPARATOR.match(text, position)
        if separator is None:
            word = _read_word(text, position)
            position = word.end
            last = ""
            if not redirect:
                yield word
            elif redirect.lstrip("0123456789") in ("<<", "<<-"):
                delimiters.append(word.text)
            redirect = ""
            continue
        position = separator.end()
        redirect = separator["redirect"] or (redirect if separator["space"] else "")
        end = separator["end"]
        if end and not (end == "\n" and last in _CONTINUED):
            yield end
        if end == "\n":
            for delimiter in delimiters:
                position = _skip_here_document(text, position, delimiter)
            delimiters = []
        elif end:
            last = end
    yield "\n"


def _skip_here_document(text: str, position: int, delimiter: str) -> int:
    """Return the position after the line that consists of the delimiter."""
    while position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        is_last = text[position:end].lstrip("\t") == delimiter
        position = end + 1
        if is_last:
            break
    return position


def _read_word(text: str, start: int) -> Word:
    simple = _SIMPLE.match(text, start)
    if simple:
        return Word(simple[0], start, simple.end())
    parts: list[str] = []
    position = start
    expands = False
    splits = False
    while position < len(text) and text[position] not in _WORD_ENDS:
        if text[position] == '"':
            end = _find_end(text, position + 1, '"')
            quoted = text[position + 1 : end].removesuffix('"')
            parts.append(_ESCAPE.sub(r"\1", quoted) if "\\" in quoted else quoted)
            expands = expands or "$" in quoted or "`" in quoted
            splits = splits or "$@" in quoted or "[@]" in quoted
        elif literal := _LITERAL.match(text, position):
            end = literal.end()
            quoted = literal[0].removeprefix("$")
            is_escape = quoted.startswith("\\")
            parts.append(quoted[1:].strip("\n") if is_escape else quoted[1:].removesuffix("'"))
        elif expansion := _EXPANSION.match(text, position):
            is_nested = expansion[0] in _CLOSERS
            end = _find_end(text, expansion.end(), expansion[0]) if is_nested else expansion.end()
            parts.append(text[position:end])
            expands = True
            splits = True
        else:
            plain = _PLAIN.match(text, position)
            end = plain.end() if plain else position + 1
            parts.append(text[position:end])
        position = end
    return Word("".join(parts), start, position, expands, splits)


def _find_end(text: str, position: int, opener: str) -> int:
    """Return the position after the closer of a quotation or a substitution, or the end of the text."""
    closers = [_CLOSERS[opener]]
    while closers:
        special = _SPECIAL.search(text, position)
        if special is None:
            return len(text)
        position = special.end()
        item = special[0]
        closer = closers[-1]
        is_quoted = closer in ('"', "`")
        if item == "\\":
            position += 1
        elif item == closer:
            closers.pop()
        elif item == "'" and not is_quoted:
            position = text.find("'", position) + 1 or len(text)
        elif item in _CLOSERS and (not is_quoted or (closer == '"' and item not in ("(", '"'))):
            closers.append(_CLOSERS[item])
    return min(position, len(text))
