"""Figures as rows with named columns, for people who have pandas and for those who have not."""

from collections.abc import Iterable, Mapping
from html import escape
from importlib.util import find_spec
from typing import Any, cast, overload

_SHOWN = 10


class Table(list[dict[str, float]]):
    """Rows, each a dict of the figures that were known then. ``table["loss"]`` is a column, with None where unknown."""

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order in which they were first seen."""
        return list(dict.fromkeys(name for row in self for name in row))

    @overload  # type: ignore[override]
    def __getitem__(self, place: str) -> list[float | None]: ...
    @overload
    def __getitem__(self, place: int) -> dict[str, float]: ...
    def __getitem__(self, place: str | int) -> Any:
        if not isinstance(place, str):
            return super().__getitem__(place)
        if place not in self.columns:
            raise KeyError(place)
        return [row.get(place) for row in self]

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
    """Return the rows as a pandas DataFrame where pandas is installed, else as a Table: both have columns by name."""
    table = Table(dict(row) for row in rows)
    if find_spec("pandas") is None:
        return table
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return cast(Table, pandas.DataFrame(list(table), columns=table.columns))
