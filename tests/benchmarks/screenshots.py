"""Takes the pictures of the interactive report in docs/: python -m tests.benchmarks.screenshots"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks.dashboard.page import write_page
from tests.benchmarks.browser import browser
from tests.benchmarks.conftest import build_spec
from tests.benchmarks.dashboard_runs import demo_run

DOCS = Path(__file__).resolve().parents[2] / "docs"


async def take(url: str) -> None:
    """One wide and light, one narrow and dark, once everything on them is drawn."""
    async with browser() as page:
        for name, width, height, dark in (("report", 1280, 1120, False), ("report-phone", 390, 844, True)):
            await page.open(url, width=width, height=height, dark=dark)
            await page.run("new Promise(done => setTimeout(done, 1500))")
            await page.screenshot(DOCS / f"{name}.png")


def main() -> None:
    """Writes docs/report.png and docs/report-phone.png."""
    with tempfile.TemporaryDirectory() as folder:
        run = demo_run(Path(folder), build_spec)
        path = write_page([run], run / "report.html", run.name)
        asyncio.run(take(path.as_uri()))


if __name__ == "__main__":
    main()
