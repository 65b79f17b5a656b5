"""Which server processes answered: their start times before and after a measurement show a restart."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_TIMEOUT_S = 5.0
_START_TIME = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def start_times(url: str) -> dict[str, float | None]:
    """Base URL -> process start (epoch seconds) of the server and of every backend it names in /server_info.

    The value is None for a server that answers but does not tell; a server that does not answer is left out.
    """
    found: dict[str, float | None] = {}
    for base, metrics in metrics_pages(url).items():
        match = _START_TIME.search(metrics)
        found[base] = float(match.group(1)) if match else None
    return found


def metrics_pages(url: str) -> dict[str, str]:
    """Base URL -> /metrics of the server and of every backend it names; one that does not answer is left out."""
    info = _get(url + "/server_info")
    backends = [] if info is None else _backends(info)
    pages = {base: _get(base + "/metrics") for base in dict.fromkeys([url, *backends])}
    return {base: page for base, page in pages.items() if page is not None}


def restarted(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> list[str]:
    """Servers of ``before`` that are gone or started anew in ``after``; unknown start times are given the benefit."""
    names = []
    for url, started in before.items():
        if url not in after:
            names.append(f"{url} (gone)")
        elif started is not None and after[url] is not None and after[url] != started:
            names.append(url)
    return names


def _backends(text: str) -> list[str]:
    try:
        info: Any = json.loads(text)
    except ValueError:
        return []
    if not isinstance(info, dict):
        return []
    entries = [entry for role in ("prefill", "decode") for entry in info.get(role) or () if isinstance(entry, dict)]
    return [str(entry["url"]).rstrip("/") for entry in entries if "url" in entry]


def _get(url: str) -> str | None:
    """The body of a GET; "" when the server answers with an error status, None when it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            return str(response.read(1 << 24).decode(errors="replace"))
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError):
        return None
