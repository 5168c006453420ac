"""A fixture for packages whose tests compute with torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Compute on one thread: more threads do not help networks this small, and wait long on a busy machine.

    The other ranks of a test have one thread too: another number changes the last bits of a sum.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
