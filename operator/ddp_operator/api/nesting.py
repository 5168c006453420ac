"""Limit the nesting of JSON from the API server, before it is decoded.

The API server stores 10,000 nested lists in a pod template. Decoders and functions that copy an object recurse, and
Kopf exits if it cannot decode an event.
"""

import re
from itertools import accumulate
from typing import Final

from ddp_operator.api.size import MAX_DEPTH

_MAX_LEVELS: Final = MAX_DEPTH + 16
"""Maximum levels of a message: a spec with too many levels remains one, and can be refused."""
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
_STRING_OR_BRACKET: Final = re.compile(_STRING.pattern + rb"|[\[\]{}]", re.DOTALL)
_STEPS: Final = [{91: 1, 123: 1, 93: -1, 125: -1}.get(byte, 0) for byte in range(256)]
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if not _STEPS[byte])


def limit_nesting(raw: bytes) -> bytes:
    """Return JSON in which null replaces every list and object below the maximum level."""
    if raw.count(b"[") + raw.count(b"{") <= _MAX_LEVELS:
        return raw
    brackets = _STRING.sub(b"", raw).translate(None, delete=_NO_BRACKETS)
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) <= _MAX_LEVELS:
        return raw

    level = 0
    kept = bytearray()
    position = 0
    for match in _STRING_OR_BRACKET.finditer(raw):
        step = _STEPS[raw[match.start()]]
        level += step
        if step > 0 and level == _MAX_LEVELS + 1:
            kept += raw[position : match.start()] + b"null"
        elif step < 0 and level == _MAX_LEVELS:
            position = match.end()
    return bytes(kept + raw[position:])
