"""Links that leave `docs/`: to a page of the site that shows the file, or to a copy of the file.

The pages are written for a repository's browser, where `../holdfast/abft/gemm/README.md` is a page.
The site shows such files as pages of its own; every other file of the repository is a download.
"""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = Path(__file__).parents[2]
# The files of the repository that are pages of the site, and the pages that show them.
PAGES = {
    "README.md": "index.md",
    "holdfast/launch/README.md": "howto/standby.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{
        f"holdfast/abft/{name}/README.md": f"operators/{name}.md"
        for name in ("attention", "embedding_bag", "gemm", "int8_gemm")
    },
    "bench/results/studies": "studies.md",
}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def redirected(text: str, folder: str, page: str) -> str:
    """Rewrite the links of a text so that they are right on a page of the site.

    Args:
        text: Markdown whose links are relative to `folder`.
        folder: Where the text lies, as a path within the repository.
        page: The page of the site that shows it, as a path within the repository.
    """
    here = posixpath.dirname(page)

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if (shown := PAGES.get(path)) is not None:
            path = f"docs/{shown}"
        elif not path.startswith("docs/") and (REPOSITORY / path).is_dir():
            # A folder has no copy: one of its files stands for it, the one that says most.
            files = sorted(file.name for file in (REPOSITORY / path).iterdir() if file.is_file())
            telling = [name for name in ("README.md", "__init__.py") if name in files]
            path = f"{path}/{(telling or files)[0]}"
        return f"{link[1]}{posixpath.relpath(path, here)}{link[3] or ''})"

    return LINK.sub(target, text)


def _page(app: "Sphinx", docname: str, source: list[str]) -> None:
    page = f"docs/{docname}.md"
    source[0] = redirected(source[0], posixpath.dirname(page), page)


def _included(app: "Sphinx", path: Path, docname: str, source: list[str]) -> None:
    folder = Path(app.srcdir, path).resolve().relative_to(REPOSITORY).parent.as_posix()
    source[0] = redirected(source[0], folder, f"docs/{docname}.md")


def setup(app: "Sphinx") -> dict[str, Any]:
    """Register the rewriting of pages and of files that they include."""
    app.connect("source-read", _page)
    app.connect("include-read", _included)
    return {"parallel_read_safe": True}
