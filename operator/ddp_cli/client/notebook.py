"""Show jobs, reports and metrics in a notebook."""

import sys
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Final, overload

from ddp_cli.view.display import Display, View, describe_progress

_SHOWN_ROWS: Final = 10
_COLORS: Final = {"Running": "#1f6feb", "Succeeded": "#1a7f37", "Failed": "#cf222e", "Rejected": "#cf222e"}


def has_notebook() -> bool:
    """Return whether this process is a notebook's kernel. IPython is never imported for the check."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookDisplay(Display):
    """A cell's output that shows the current state of a job."""

    def __init__(self, name: str) -> None:
        ipython: Any = import_module("IPython.display")
        self._name = name
        self._html = ipython.HTML
        self._handle = ipython.display(ipython.HTML(""), display_id=True)

    def update(self, view: View) -> None:
        """Replace the output."""
        self._handle.update(self._html(render(self._name, view)))


def render(name: str, view: View, explanation: str = "") -> str:
    """Return a job as HTML: a progress bar, its metrics, and why it waits or failed."""
    color = _COLORS.get(view.title, "#9a6700")
    progress = describe_progress(view.progress, percent=False)
    state = [f"attempt {view.attempt}"] if view.attempt > 1 else []
    state += [f"{view.nodes[0]}/{view.nodes[1]} pods"] if view.nodes[1] else []
    details = " · ".join([*state, *progress, *view.shown_reason])
    percent = "" if view.percent is None else f"{view.percent:.1f}%"
    bar = (
        '<div style="background:#8884;height:8px;border-radius:4px;max-width:480px;margin:6px 0">'
        f'<div style="background:{color};height:8px;border-radius:4px;width:{percent}"></div></div>'
        if percent
        else ""
    )
    more = f'<pre style="white-space:pre-wrap">{escape(explanation)}</pre>' if explanation else ""
    head = f'<b>{escape(name)}</b> <span style="color:{color};font-weight:600">{escape(view.title)}</span>'
    return f"<div>{head} {percent}{bar}<small>{escape(details)}</small>{more}</div>"


class Report(str):
    """The HTML page of a report, which a notebook shows in a frame."""

    def save(self, path: str | Path) -> Path:
        """Write the page to a file. Raises: OSError."""
        path = Path(path)
        path.write_text(self, encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"<Report of {len(self)} characters; report.save(path) writes it>"

    def _repr_html_(self) -> str:
        style = "width:100%;height:720px;border:0"
        return f'<iframe srcdoc="{escape(self)}" sandbox="allow-scripts" style="{style}"></iframe>'


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
        rows = ""
        for row in list(self)[-_SHOWN_ROWS:]:
            cells = (f"{row[name]:.6g}" if name in row else "" for name in self.columns)
            rows += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        more = f"<caption>the last {_SHOWN_ROWS} of {len(self)} rows</caption>" if len(self) > _SHOWN_ROWS else ""
        return f"<table>{more}<tr>{heads}</tr>{rows}</table>"
