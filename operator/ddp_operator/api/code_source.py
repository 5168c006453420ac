"""``spec.code.source`` and ``revision``, which the commands write and the feature ``code`` reads. Pure."""

from typing import Final, NamedTuple

from ddp_operator.api.code_paths import CODE_FILE

CONFIG_MAP: Final = "configmap"
CLAIM: Final = "claim"
IMAGE: Final = "image"
"""Kinds of a source."""


class CodeSource(NamedTuple):
    """The kind of a source, the name of its object, and the path of the archive in the volume."""

    kind: str
    name: str
    path: str


def split_source(source: str) -> CodeSource:
    """Return the parts of configmap/NAME, claim/NAME/PATH or image/REFERENCE."""
    kind, _, name = source.partition("/")
    if kind != CLAIM:
        return CodeSource(kind, name, CODE_FILE)
    name, _, path = name.partition("/")
    return CodeSource(kind, name, path)


def describe_revision(digest: str, commit: str, *, is_dirty: bool) -> str:
    """Return the revision of a folder by the digest of its archive. ``commit``: empty if it is unknown."""
    if not commit:
        return digest[:12]
    # Two dirty trees of a commit differ in their digest alone.
    return f"{commit[:12]}-dirty {digest[:12]}" if is_dirty else commit[:12]
