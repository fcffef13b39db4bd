"""A page as a tree that a test can ask: strict, so that a page that is not balanced fails."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "wbr", "br", "link", "img", "input"}


@dataclass
class Node:
    """An element, its attributes, and what is in it, text included."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Node | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it, drawings' titles left out, with single spaces."""
        parts = [
            child if isinstance(child, str) else child.text
            for child in self.children
            if isinstance(child, str) or child.name not in ("title", "style", "script", "wbr")
        ]
        glue = "" if self.name in ("td", "div", "th") and self._broken() else " "
        return " ".join(glue.join(parts).split())

    def _broken(self) -> bool:
        return any(isinstance(child, Node) and child.name == "wbr" for child in self.children)

    def all(self, name: str, style: str | None = None) -> list["Node"]:
        """The elements of a name, and perhaps of a class, in the order of the page."""
        found = []
        for child in self.children:
            if isinstance(child, str):
                continue
            if child.name == name and (style is None or style in child.styles):
                found.append(child)
            found += child.all(name, style)
        return found

    @property
    def styles(self) -> list[str]:
        """Its classes."""
        return self.attributes.get("class", "").split()

    def section(self, title: str) -> "Node":
        """The section with this heading; fails if there is not exactly one."""
        (found,) = [s for s in self.all("section") if s.all("h2")[0].text == title]
        return found

    def rows(self) -> list[dict[str, str]]:
        """The rows of all tables in it, by their columns' names."""
        found = []
        for table in self.all("table"):
            heads = [head.text for head in table.all("th")]
            for row in table.all("tbody")[0].all("tr"):
                cells = row.all("td")
                assert [cell.attributes["data-label"] for cell in cells] == heads
                found.append(dict(zip(heads, (cell.text for cell in cells), strict=True)))
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("root")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        assert len(node.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> closes <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parse(page: str) -> Node:
    """The tree of a page; fails if it is not balanced."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert parser._open == [parser.root], "an element is not closed"
    return parser.root
