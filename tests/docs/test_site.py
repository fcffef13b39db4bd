"""The documentation site: no page outside of its tables of contents, no public module without one.

`make docs` builds it and checks more: links, tutorials, and every single public name.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXTENSIONS = DOCS / "_ext"
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Pages that are for those who change holdfast, and are read in the repository.
UNLISTED = {"bug_tests.md"}


def listed(page: Path) -> Iterator[Path]:
    """All pages below a page, by its tables of contents."""
    for block in TOCTREE.findall(page.read_text()):
        for entry in block.split("\n"):
            if entry and not entry.startswith(":"):
                below = Path(os.path.normpath(page.parent / f"{entry}.md"))
                yield below
                yield from listed(below)


def test_every_page_is_in_one_table_of_contents() -> None:
    found = [str(page.relative_to(DOCS)) for page in listed(DOCS / "index.md")]
    assert len(found) == len(set(found))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert {"index.md", *found} == pages - UNLISTED


def test_every_public_module_has_a_page() -> None:
    spec = importlib.util.spec_from_file_location("modules", EXTENSIONS / "public_modules.py")
    assert spec is not None
    assert spec.loader is not None
    modules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules)
    blocks = [
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^```\{public-names\} (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(blocks) == modules.public_modules()


def test_links_out_of_the_docs_lead_to_pages_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXTENSIONS)
    from outside_links import redirected

    monkeypatch.delitem(sys.modules, "outside_links")
    text = (
        "[a](../holdfast/abft/gemm/README.md#bound) [b](guard.md) [c](../bench/results/demo.jsonl)"
    )
    assert redirected(text, "docs", "docs/howto/x.md") == (
        "[a](../operators/gemm.md#bound) [b](../guard.md) [c](../../bench/results/demo.jsonl)"
    )
    assert redirected("[d](docs/gpu.md)", "", "docs/contributing.md") == "[d](gpu.md)"
