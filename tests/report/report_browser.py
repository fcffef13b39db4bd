"""Pages in a headless Chromium; tests that need one skip where there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=2000",
)


def browse(folder: Path, page: Path, *options: str) -> str:
    """Open a page with a profile of its own; what the browser prints on standard output."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [found, *FLAGS, profile, *options, page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, text=True, check=True)
    return done.stdout


def ask(
    folder: Path, page: str, question: str, *, width: int = 1000, options: tuple[str, ...] = ()
) -> str:
    """The value of a JavaScript expression in a page that is ``width`` CSS pixels wide."""
    told = f"onload = () => parent.postMessage(String({question}), '*')"
    asked = page.replace("</body>", f"<script>{told}</script></body>")
    (folder / "inner.html").write_text(asked)
    (folder / "outer.html").write_text(
        "<!doctype html><p id=answer></p><script>onmessage = e => "
        "document.getElementById('answer').textContent = e.data</script>"
        f"<iframe src=inner.html style='width:{width}px;height:900px;border:0'></iframe>"
    )
    shown = browse(folder, folder / "outer.html", "--dump-dom", *options)
    return shown.partition('<p id="answer">')[2].partition("</p>")[0]
