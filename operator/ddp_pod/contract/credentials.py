"""Credentials in the URLs of texts, which no message and no file may show."""

import re

# What precedes an @: a user and a password, which may contain slashes, or the user of a web server. A port is no
# credential.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/:]*:(?!\d+/)|(?:(?<=http://)|(?<=https://))[^/]*\Z)")
_ENDS = " \t\r\n\"'<>"
"""Characters that no URL contains."""
# Parameters with a password, a token or a signature, such as X-Amz-Signature=, sig= and access_token=.
_PARAMETER = re.compile(
    r"([?&#][\w.~%-]*(?:token|signature|sig|key|keyid|secret|password|passwd|pwd|credential|auth)=)[^\s&#\"'<>)]+", re.I
)


def has_credentials(url: str) -> bool:
    """Return whether a URL contains a password, or the user of a web server."""
    return _hide_users(url) != url


def hide_credentials(text: str) -> str:
    """Replace the users, passwords, tokens and signatures in the URLs of a text by ``***``."""
    return _PARAMETER.sub(r"\1***", _hide_users(text))


def _hide_users(text: str) -> str:
    """Replace the users and passwords, which contain no space, by ``***``."""
    *parts, last = text.split("@") if "://" in text else [text]
    for number, part in enumerate(parts):
        match = _CREDENTIALS.search(part, 1 + max(map(part.rfind, _ENDS)))
        if match:
            parts[number] = f"{part[: match.start()]}***"
    return "@".join([*parts, last])
