"""Shell patterns of recovery.nodeHealth match as in the standard library, which compiles each of them."""

from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.kubeobjects import match_glob

names = st.text("abc-[]!*?", max_size=3)
parts = st.sampled_from(
    ["a", "b", "*", "**", "?", "[ab]", "[!a]", "[a-c]", "[]a]", "[!]a]", "[", "]", "!", "-", "[a-]"]
)
patterns = st.lists(parts, max_size=4).map("".join)


@given(names, patterns)
def test_glob_matches_as_fnmatch(name: str, pattern: str) -> None:
    assert match_glob(name, pattern) == fnmatchcase(name, pattern)
