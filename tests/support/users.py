"""Users as in pods: a number without a login name or a home folder."""

from __future__ import annotations

import pwd
from typing import NoReturn

import pytest


def forget_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the login name and the home folder of the test's own user."""

    def find_nothing(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", find_nothing)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
