"""Metrics as a table with named columns, with or without pandas."""

from collections.abc import Iterable, Mapping
from html import escape
from importlib.util import find_spec
from typing import Any, cast, overload

_SHOWN = 10


class Table(list[dict[str, float]]):
    """Rows of metrics as dicts; unknown values are absent. ``table["loss"]`` is a column, with None for them."""

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order in which they were first seen."""
        return list(dict.fromkeys(name for row in self for name in row))

    @overload  # type: ignore[override]
    def __getitem__(self, key: str) -> list[float | None]: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, float]: ...
    def __getitem__(self, key: str | int) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.columns:
            raise KeyError(key)
        return [row.get(key) for row in self]

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{row.get(name, ''):.6g}</td>" if name in row else "<td></td>" for name in self.columns)
            for row in list(self)[-_SHOWN:]
        )
        more = f"<caption>the last {_SHOWN} of {len(self)} rows</caption>" if len(self) > _SHOWN else ""
        return f"<table>{more}<tr>{heads}</tr>{rows}</table>"


def make_table(rows: Iterable[Mapping[str, float]]) -> Table:
    """Return the rows as a pandas DataFrame if pandas is installed, else as a Table."""
    table = Table(dict(row) for row in rows)
    if find_spec("pandas") is None:
        return table
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return cast(Table, pandas.DataFrame(list(table), columns=table.columns))
