"""Show jobs and reports in a notebook."""

import sys
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from ddp_cli.view.display import Display, View, describe_progress

_COLORS = {"Running": "#1f6feb", "Succeeded": "#1a7f37", "Failed": "#cf222e", "Rejected": "#cf222e"}


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
        return f'<iframe srcdoc="{escape(self)}" sandbox="" style="{style}"></iframe>'
