"""Find the commands in an explanation, which a page shows with a button to copy them. Pure."""

import re
from collections.abc import Iterator
from typing import Final

# A command of ours begins with its name, and ends with its sentence, clause or parenthesis.
_COMMAND: Final = re.compile(r"\b(?:ddp [a-z]+|kubectl [a-z]+)(?: (?:[^\s();,:.`]|[:,.](?=\S))+)*")
_WORDS: Final = re.compile(
    r" (?:prints?|shows?|reads?|has|have|explains?|lists?|and|or|if|on|to|with|then|from|for|is|checks?)(?= |$).*"
)


def split_commands(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and whether each is a command."""
    done = 0
    for match in _COMMAND.finditer(text):
        command = _WORDS.sub("", match[0])
        if match.start() > done:
            yield text[done : match.start()], False
        is_whole = command.count(" ") > 1 or command.startswith("kubectl")
        yield command, is_whole
        done = match.start() + len(command)
    if done < len(text):
        yield text[done:], False
