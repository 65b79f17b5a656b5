"""One HTML page with everything inside: style, script, the data and plotly.js, the last two deflated."""

from __future__ import annotations

import base64
import functools
import html
import importlib.util
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.dashboard.data import build

FILE_NAME = "report.html"
_HERE = Path(__file__).parent


class DashboardError(RuntimeError):
    """The page cannot be made; the message says what to install."""


def write_page(sources: Sequence[Path], path: Path, title: str) -> Path:
    """Writes the page of ``sources`` to ``path``, whole or not at all. Raises ResultError, DashboardError."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(render(build(sources), title))
    temporary.replace(path)
    return path


def render(payload: Mapping[str, Any], title: str, *, live: bool = False) -> str:
    """The page as text; ``live`` makes it follow the server it came from. Raises DashboardError without plotly."""
    parts = {
        "title": html.escape(title),
        "style": (_HERE / "style.css").read_text(),
        "script": (_HERE / "app.js").read_text(),
        "data": packed(json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()),
        "plotly": _plotly(),
        "live": json.dumps(live),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], (_HERE / "page.html").read_text())


def packed(content: bytes) -> str:
    """zlib, then base64: what the page's `inflate` reads, and nothing that HTML could mistake for markup."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


@functools.cache
def _plotly() -> str:
    # Found without importing the package, which takes a second and is not needed for its file.
    found = importlib.util.find_spec("plotly")
    script = None if found is None or found.origin is None else Path(found.origin).parent / "package_data/plotly.min.js"
    if script is None or not script.is_file():
        raise DashboardError("plotly.js comes from the Python package plotly: pip install 'plotly>=6'")
    return packed(script.read_bytes())
