"""Credentials in the URLs of texts, which no message and no file may show."""

import re

# What precedes an @: a user and a password, which may contain slashes, or the user of a web server. A port is no
# credential.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/:]*:(?!\d+/)|(?:(?<=http://)|(?<=https://))[^/]*\Z)", re.I)
# What may be one too: a password that begins as a port after a name without a domain, and a user and a password
# without a scheme. A number such as top1:76.1@epoch3 is no password.
_POSSIBLE_CREDENTIALS = re.compile(
    r"(?<=://)(?!localhost:)[^/:.]*:\d+/"
    r"|(?<![\w+%~./:@-])(?!mailto:|localhost:)(?:[\w+%~-]+:|[\w+%~.-]+:(?!\d+/))(?!//|[\d.e+-]*\Z)",
    re.I,
)
_ENDS = " \t\r\n\"'<>"
"""Characters that no URL contains."""
_DIGEST = re.compile(r"sha\d+:")  # of an image: name:tag@sha256:...
# Parameters with a password, a token or a signature, such as X-Amz-Signature=, sig= and access_token=.
_PARAMETER = re.compile(
    r"([?&#][\w.~%-]*(?:token|signature|sig|key|keyid|secret|password|passwd|pwd|credential|auth)=)[^\s&#\"'<>)]+", re.I
)


def has_credentials(url: str) -> bool:
    """Return whether a URL contains a password, or the user of a web server."""
    return any(_CREDENTIALS.search(part) for part in url.split("@")[:-1])


def hide_credentials(text: str) -> str:
    """Replace the users, passwords, tokens and signatures in the URLs of a text by ``***``."""
    return _PARAMETER.sub(r"\1***", _hide_users(text))


def _hide_users(text: str) -> str:
    """Replace the users and passwords, which contain no space, by ``***``."""
    parts = text.split("@")
    is_hidden = False
    for number, part in enumerate(parts[:-1]):
        start = 1 + max(map(part.rfind, _ENDS))
        user = _find_user(part, start, parts[number + 1])
        if user is None and is_hidden and start == 0 and "/" not in part:
            user = 0  # a password that contains an @
        is_hidden = user is not None
        if is_hidden:
            parts[number] = f"{part[:user]}***"
    return "@".join(parts)


def _find_user(part: str, start: int, following: str) -> int | None:
    """Return where a user and a password begin, which end with a part of a text before an @; None without them."""
    match = _CREDENTIALS.search(part, start) if ":" in part else None
    if match is None and ":" in part and not _DIGEST.match(following):
        match = _POSSIBLE_CREDENTIALS.search(part, start)
    return None if match is None else match.start()
