"""HTML and SVG as strings in which all text is escaped."""

from collections.abc import Iterable
from html import escape

from holdfast.logs import printable
from holdfast.report.quantities import shortened


class Markup(str):
    """A string that is HTML or SVG; any other string is escaped when it is inserted."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Make an element: ``tag("td", text, class_="n", data_label="step")``.

    Children are strings, numbers, None (nothing) or iterables of these. In the names of attributes
    a trailing underscore is removed and others become hyphens; attributes that are None are left
    out.
    """
    opened = name + "".join(
        f' {_attribute(key)}="{escape(_shown(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{opened}>{joined(children)}</{name}>")


def joined(children: object) -> Markup:
    """Return one child or several as one string of markup, with plain text escaped."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, Iterable) and not isinstance(children, str):
        return Markup("".join(joined(child) for child in children))
    return Markup(escape(_shown(str(children))))


def breakable(name: str) -> Markup:
    """Make a name that may be broken into lines after each of its slashes."""
    return Markup(escape(_shown(shortened(name))).replace("/", "/<wbr>"))


def _shown(text: str) -> str:
    """Replace characters that have no place in HTML, or that no file can hold."""
    return "".join(each if each in "\n\t" else printable(each) for each in text)


def _attribute(key: str) -> str:
    return key.removesuffix("_").replace("_", "-")
