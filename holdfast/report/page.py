"""A report as one HTML page that needs no network and no other file."""

import time
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from holdfast import __version__
from holdfast.report.markup import Markup, joined, tag
from holdfast.report.parts import ICONS
from holdfast.report.verdict import LEVELS, Verdict


def render(name: str, made_s: float, verdict: Verdict, sections: Sequence[Markup]) -> str:
    """Render the page of any report, which was made at a time in seconds since 1970."""
    template = files("holdfast.report").joinpath("page.html").read_text(encoding="utf-8")
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made_s))
    toggle = tag("button", "Light / dark", id="theme", type="button", hidden="hidden")
    body = (
        tag("header", tag("strong", "holdfast"), tag("span", name), toggle),
        tag("main", _verdict(verdict), *sections),
        tag("footer", f"Made by holdfast {__version__} on {made}, of what was there then."),
    )
    title = f"{name}: {verdict.headline}"
    return Template(template).substitute(title=joined(title), body=joined(body))


def _verdict(verdict: Verdict) -> Markup:
    level = tag("div", ICONS[verdict.level], " ", LEVELS[verdict.level], class_="level")
    lines = (tag("p", line) for line in verdict.lines)
    style = f"verdict {verdict.level}"
    return tag("div", level, tag("h1", verdict.headline), *lines, class_=style)
