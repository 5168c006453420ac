"""The pages as text: complete, escaped, and in one file when saved."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.client.logs import Line
from ddp_cli.features.ui.job_page import JobPage
from ddp_cli.features.ui.logs import LogPiece
from ddp_cli.features.ui.render import SCRIPTS, STATIC, render_parts, render_saved, to_json
from ddp_cli.features.ui.run import LoggedEvent, read_run
from ddp_cli.features.ui.sources import build_run_page
from ddp_cli.local.folder import RunFolder
from ddp_cli.view.why import Note
from tests.support.builders import NOW, resource
from tests.unit.ddp_cli.features.ui.test_run import write_run

HOSTILE = "<script>alert(1)</script>\x1b[31mred\u202egnp\x00 https://me:secret@host/"


def make_page(tmp_path: Path, **status: Any) -> JobPage:
    path = write_run(tmp_path, **status)
    return build_run_page(read_run(path), path, key=f"run/{path.name}")


class Reader(HTMLParser):
    """Collects what a page would fetch, its scripts and styles, inline code, and the tags that are open at its end."""

    VOID = ("meta", "link", "br", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.code: list[str] = []
        self.inline: list[str] = []
        self.open: list[str] = []
        self.data = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "xlink:href", "action")]
        self.links += [str(value) for name, value in attrs if name == "href" and tag == "link"]
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.is_data = ("type", "application/json") in attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style") and self.is_data:
            self.data += data
        elif self.open and self.open[-1] in ("script", "style"):
            self.code.append(data)


def test_saved_page_is_one_file_whose_policy_names_its_own_code(tmp_path: Path) -> None:
    page = render_saved(make_page(tmp_path))
    reader = Reader(page)
    assert reader.links == ["data:,"]
    assert reader.open == []
    assert reader.inline == []
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)">', page)
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in reader.code]
    assert len(hashes) == 4, "one style and three scripts"
    assert all(digest in policy.replace("&#43;", "+") for digest in hashes)


def test_saved_page_has_the_curves_of_the_run_with_their_marks(tmp_path: Path) -> None:
    curves = json.loads(Reader(render_saved(make_page(tmp_path))).data)
    assert [chart["id"] for chart in curves["charts"]] == ["loss", "rate", "step-time"]
    loss = curves["charts"][0]["lines"][0]
    assert [len(part["t"]) for part in loss["parts"]] == [6, 5, 1], "no line over a restart"
    assert curves["marks"] == [{"t": 5.0, "s": 5.0, "text": "1"}, {"t": 10.0, "s": 10.0, "text": "2 attempt 2"}]
    assert [mark["s"] for mark in curves["checkpoints"]] == [4.0, 8.0]


def test_saved_page_hides_the_values_of_environment_variables(tmp_path: Path) -> None:
    job = make_page(tmp_path)
    container = {"name": "trainer", "image": "i", "env": [{"name": "WORD", "value": "open-sesame"}]}
    job.run.resource["spec"]["template"]["spec"]["containers"] = [container]
    assert "open-sesame" not in render_saved(job)
    assert "(hidden)" in render_saved(job)


@pytest.mark.parametrize("form", ["saved", "parts"])
def test_text_of_jobs_stays_text(tmp_path: Path, form: str) -> None:
    failure = {"attempt": 1, "category": HOSTILE, "message": HOSTILE, "traceback": HOSTILE, "remedy": HOSTILE}
    job = make_page(tmp_path, lastFailure=failure, tracking={"runId": "1", "links": ["javascript:alert(1)", HOSTILE]})
    lines = [Line("", "rank 0", HOSTILE)]
    page = render_saved(job, LogPiece(lines)) if form == "saved" else "".join(render_parts(job).values())
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert 'href="javascript' not in page
    for sign in ("\x1b", "\u202e", "\x00", "secret@"):
        assert sign not in page


def test_data_in_a_page_cannot_end_its_element() -> None:
    text = to_json({"name": "</script><!--", "value": 1})
    assert "<" not in text
    assert json.loads(text)["name"] == "</script><!--"


def test_page_of_killed_run_explains_how_to_resume(tmp_path: Path) -> None:
    job = make_page(tmp_path, phase="Running")
    assert job.state == ("Interrupted", "bad")
    assert "only the script knows whether it saved a checkpoint" in job.findings[0].what
    run = RunFolder(tmp_path / job.run.name)
    run.write_manifest("", [], {}, "ddp run job.yaml --cpu -- '<b>'")
    run.write_status(resource(checkpoint={"path": "/ckpt", "claimName": "c"}) | {"status": {"phase": "Running"}})
    assert build_run_page(read_run(run.path), run.path).state.word != "Interrupted"
    path = run.path
    del run  # the lock goes with it
    killed = build_run_page(read_run(path), path)
    assert killed.findings[0].todo == "Start it with: ddp run job.yaml --cpu -- '<b>'"
    assert "'&lt;b&gt;'".replace("'", "&#39;") in render_parts(killed)["now"]


@pytest.mark.parametrize(("traceback", "code", "shown"), [("", 137, "SIGKILL"), ("", 1, ""), ("line 8", 137, "line 8")])
def test_failure_has_its_traceback_or_the_reason_for_none(
    tmp_path: Path, traceback: str, code: int, shown: str
) -> None:
    failure = {"attempt": 1, "category": "Killed", "message": "m", "exitCode": code, "traceback": traceback}
    now = render_parts(make_page(tmp_path, lastFailure=failure))["now"]
    assert [text for text in ("SIGKILL", "line 8") if text in now] == list(filter(None, [shown]))


def test_explanation_has_its_commands_marked(tmp_path: Path) -> None:
    text = "Run changed code: ddp rerun mine -n team. It ends; kubectl get pods -o wide -l a=b."
    job = make_page(tmp_path)
    job.findings = [Note("", text)]
    job.commands = ()
    marked = render_parts(job)["now"]
    assert re.findall(r"<code>(.*?)</code>", marked) == ["ddp rerun mine -n team", "kubectl get pods -o wide -l a=b"]


def test_scripts_of_the_package_are_present() -> None:
    assert all((STATIC / name).is_file() for name in SCRIPTS)


def test_tables_state_how_many_rows_they_leave_out(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    events = [LoggedEvent(2000.0 + 20 * number, "Warning", "FailureOOM", "m") for number in range(500)]
    parts = render_parts(JobPage(replace(run, events=events), NOW))
    assert parts["events"].count("<b>FailureOOM</b>") == parts["timeline"].count("<b>OOM</b>") == 200
    assert "300 earlier ones are left out." in parts["events"]
    assert re.search(r"\d+ earlier ones are left out.", parts["timeline"])
    times = re.findall(r'<td class="n">(\w+)</td><td><b>OOM</b>', parts["timeline"])
    assert len(set(times)) == 200, "also after an hour those of one minute differ"
    assert times[-1] == "3h03m00s"
