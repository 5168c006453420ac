"""Hooks of MkDocs: README.md is the landing page, and linked files outside docs/ become part of the site."""

import os
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

_ROOT: Final = Path(__file__).resolve().parents[2]
_FOLDER: Final = "repository"  # below it the site has the files outside docs/, under their paths
_DIAGRAMS: Final = "assets/javascripts/mermaid.min.js"  # of .ci/docs; the theme's own copy is on another host
_LINK: Final = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """List the decision records in the navigation, their index first."""
    records = sorted((_ROOT / "docs" / "adr").glob("[0-9]*.md"))
    for section in config["nav"]:
        for entry in section.get("Background", []):
            if "Decisions" in entry:
                entry["Decisions"] = ["adr/README.md", *(f"adr/{record.name}" for record in records)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the landing page and the linked files outside docs/, with the links that lead from them to others."""
    sources = {"index.md": "README.md"}
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    while waiting:
        page = waiting.pop()
        for target in _find_targets(page):
            uri = _site_path(target)
            if target.startswith("docs/") or uri in sources:
                continue
            sources[uri] = target
            if target.endswith(".md"):
                waiting.append(target)
    for uri, source in sources.items():
        if source.endswith(".md"):
            content = _rewrite_links(source, (_ROOT / source).read_text(encoding="utf-8"))
            files.append(File.generated(config, uri, content=content))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(_ROOT / source)))
    files.append(File.generated(config, _DIAGRAMS, abs_src_path=os.environ["DIAGRAMS_SCRIPT"]))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the script that draws diagrams, on pages with a diagram only: it has megabytes."""
    if '<pre class="mermaid">' not in output:
        return output
    start = posixpath.relpath(_DIAGRAMS, page.url or ".")
    return output.replace("</head>", f'<script src="{start}"></script></head>', 1)


def on_post_build(config: Any) -> None:
    """Point the links of llms.txt to the pages of the site."""
    path = Path(config["site_dir"]) / "llms.txt"
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"(\]\([\w-]+)\.md([)#])", r"\1/\2", text), encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ to the copies in the site."""
    if page.file.generated_by is not None:
        return markdown
    return _rewrite_links(f"docs/{page.file.src_uri}", markdown)


def _site_path(path: str) -> str:
    """Return a path of the repository as the site has it."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{_FOLDER}/{path}"


def _resolve(page: str, link: str) -> str | None:
    """Return the file of the repository that a page links to; None for an address and for a file that is missing."""
    if re.match(r"[a-z]+:", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return target if (_ROOT / target).is_file() else None


def _find_targets(page: str) -> list[str]:
    text = (_ROOT / page).read_text(encoding="utf-8")
    targets = (_resolve(page, match[2]) for match in _LINK.finditer(text))
    return [target for target in targets if target is not None]


def _rewrite_links(page: str, text: str) -> str:
    def rewrite(match: re.Match[str]) -> str:
        target = _resolve(page, match[2])
        if target is None:
            return match[0]
        start = posixpath.dirname(_site_path(page)) or "."
        return f"{match[1]}{posixpath.relpath(_site_path(target), start)}{match[3] or ''}{match[4]}"

    return _LINK.sub(rewrite, text)
