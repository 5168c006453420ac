"""Draw the pages: templates whose text is always escaped, and cleaned of control characters and credentials."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ddp_cli.features.ui.curves import build_curves
from ddp_cli.features.ui.job_page import JobPage, format_settings, format_value
from ddp_cli.features.ui.logs import LogPiece
from ddp_cli.features.ui.rows import Attention, Row, sort_rows
from ddp_cli.view.terminal import make_printable
from ddp_operator._version import __version__
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.status import ENDED_PHASES

STATIC: Final = Path(__file__).parent / "static"
SCRIPTS: Final = ("uPlot.iife.min.js", "idiomorph.min.js", "page.js", "charts.js")
_LIVE: Final = ("idiomorph.min.js",)
"""Not part of a saved page, which does not change."""
_NO_LINES: Final = LogPiece()
_MOST_ROWS: Final = 200
"""Of a table of Events or failures."""
STYLES: Final = ("uPlot.min.css", "page.css")
PARTS: Final = ("head", "now", "timeline", "ranks", "events", "settings")
"""The parts of a job's page that change, each a template and an element."""


def _clean(value: Any) -> Any:
    """Return a value of a template. Markup is ours."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return make_printable(value)
    return value


def _format_time(moment: datetime | None) -> Markup:
    """Return a time, which the browser shows in the user's zone."""
    if moment is None:
        return Markup("")
    utc = moment.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(utc.isoformat(), f"{utc:%Y-%m-%d %H:%M:%S} UTC")


def _format_duration(seconds: float) -> str:
    return "<1s" if 0 < seconds < 1 else format_duration(seconds)


def _format_offset(seconds: float) -> str:
    """Return a time since the start with its seconds, which tell events apart that are close together."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}m{rest:02}s" if minutes >= 60 else _format_duration(seconds)


def _format_milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else format_value(round(1000 * seconds, 0 if seconds > 0.01 else 2))


# A command of ours begins with its name, and ends with its sentence, clause or parenthesis.
_COMMAND: Final = re.compile(r"\b(?:ddp [a-z]+|kubectl [a-z]+)(?: (?:[^\s();,:.`]|[:,.](?=\S))+)*")
_PROSE: Final = re.compile(
    r" (?:prints?|shows?|reads?|has|have|explains?|lists?|and|or|if|on|to|with|then|from|for|is|checks?)(?= |$).*"
)


def _mark_commands(text: str) -> Markup:
    """Return an explanation with its commands marked, each with a button to copy it."""
    marked = Markup("")
    done = 0
    text = make_printable(text)
    for match in _COMMAND.finditer(text):
        command = _PROSE.sub("", match[0])
        is_whole = command.count(" ") > 1 or command.startswith("kubectl")
        marked += text[done : match.start()]
        marked += _MARKED.format(command) if is_whole else command
        done = match.start() + len(command)
    return marked + text[done:]


_MARKED: Final = Markup('<span class="command"><code>{}</code><button type="button" data-copy>Copy</button></span>')


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(str(__package__)),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "time": _format_time,
        "moment": lambda seconds: _format_time(datetime.fromtimestamp(seconds, UTC)),
        "duration": _format_duration,
        "offset": _format_offset,
        "ms": _format_milliseconds,
        "value": format_value,
        "commands": _mark_commands,
    }
    environment.globals |= {"version": __version__, "attentions": list(Attention)}
    environment.globals |= {"most_rows": _MOST_ROWS, "ended_phases": ENDED_PHASES}
    return environment


def render(template: str, **values: Any) -> str:
    """Return a page or a part of one."""
    return _environment().get_template(f"{template}.html").render(**values)


def render_rows(rows: Iterable[Row]) -> dict[str, str]:
    """Return the rows of the list by their keys, in its order. Those that have not changed are not drawn again."""
    return {row.key: _render_row(row) for row in sort_rows(rows)}


@lru_cache(maxsize=8000)
def _render_row(row: Row) -> str:
    return render("row", row=row)


def render_parts(page: JobPage, *, saved: bool = False) -> dict[str, str]:
    """Return the parts of a job's page by the names of their elements. A ``saved`` page hides variables' values."""
    settings = format_settings(page.run.resource, hide_values=saved)
    return {name: render(name, page=page, settings=settings, saved=saved) for name in PARTS}


def render_job(page: JobPage) -> str:
    """Return the live page of a job."""
    return render("job", page=page, parts=render_parts(page), curves=render_curves(page), saved=False, scripts=())


def render_curves(page: JobPage) -> str:
    """Return the charts of a job as JSON."""
    return to_json(build_curves(page.run))


def to_json(value: Any) -> str:
    """Return JSON with clean texts that is safe inside of a script element, without numbers that JSON does not have."""
    text = json.dumps(_clean_data(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _clean_data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _clean_data(item) for name, item in value.items()}
    return [_clean_data(item) for item in value] if isinstance(value, list | tuple) else _clean(value)


def render_saved(page: JobPage, piece: LogPiece = _NO_LINES) -> str:
    """Return the page of a job as one file that needs no server: its policy allows its own scripts and styles alone."""
    scripts = [_read_static(name) for name in SCRIPTS if name not in _LIVE]
    style = "".join(map(_read_static, STYLES))
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return render(
        "job",
        page=page,
        parts=render_parts(page, saved=True),
        piece=piece,
        curves=render_curves(page),
        policy=policy,
        scripts=list(map(Markup, scripts)),
        style=Markup(style),
        saved=True,
        now=utc_now(),
    )


@cache
def _read_static(name: str) -> str:
    text = (STATIC / name).read_text(encoding="utf-8")
    assert "</script" not in text
    return f"{text}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
