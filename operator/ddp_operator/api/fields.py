"""Base classes of the typed spec and status: immutable, keyword-only, camelCase in JSON."""

from msgspec import Struct


class SpecFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Base of a group of spec fields. Unknown fields are refused."""


class StatusFields(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of a group of status fields. Unknown fields are ignored: a newer operator may have written them."""
