"""The page in a real browser: it fits a phone, has two themes, prints, and asks for nothing."""

import re
from pathlib import Path

import pytest
from report_browser import ask, browse
from report_dom import parse
from report_runs import corrected, repeated, restored, struck, write_run

from holdfast.report import gather, page

DARK = ("--blink-settings=preferredColorScheme=0",)
LIGHT = ("--blink-settings=preferredColorScheme=1",)
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture
def text(tmp_path: Path) -> str:
    story = [struck(1.0), corrected(1.1), repeated(5.0, "transient", step=3), restored(9.0)]
    story += [corrected(20.0 + n, step=5, op=f"blocks.{n}.attn/bmm#2/grad_a") for n in range(5)]
    write_run(tmp_path / "calm", mode="bare")
    write_run(tmp_path / "storm", story)
    return page(gather(tmp_path))


def test_a_browser_shows_what_the_page_says(text, tmp_path):
    (tmp_path / "page.html").write_text(text)
    shown = parse(browse(tmp_path, tmp_path / "page.html", "--dump-dom").partition("\n")[2])
    written = parse(text.partition("\n")[2])
    sections = [[node.text for node in tree.all("section")] for tree in (shown, written)]
    assert sections[0] == sections[1]
    assert len(sections[0]) == 9


@pytest.mark.parametrize("width", [320, 390, 640, 760, 761, 1200])
def test_nothing_is_wider_than_the_page(text, tmp_path, width):
    wide = "document.documentElement.scrollWidth + ' ' + innerWidth"
    scrolled, inner = map(int, ask(tmp_path, text, wide, width=width).split())
    assert inner == width
    assert scrolled <= width


@pytest.mark.parametrize(("width", "shown"), [(390, "narrow"), (1000, "wide")])
def test_one_of_two_drawings_is_shown_and_its_text_is_legible(text, tmp_path, width, shown):
    drawn = (
        "[...document.querySelectorAll('.chart')].map(c => [...c.children].filter(d => "
        "d.offsetWidth).map(d => d.className + ' ' + Math.round(12 * "
        "d.firstChild.clientWidth / d.firstChild.viewBox.baseVal.width)).join()).join(';')"
    )
    answers = ask(tmp_path, text, drawn, width=width).split(";")
    assert len(answers) == 3
    for answer in answers:
        name, size_px = answer.split()
        assert name == shown
        assert int(size_px) >= 10


def test_no_label_of_a_drawing_is_cut_off(text, tmp_path):
    cut = (
        "[...document.querySelectorAll('svg text')].filter(t => { const b = t.getBBox(), v = "
        "t.ownerSVGElement.viewBox.baseVal; return b.width && (b.x < 0 || b.x + b.width > v.width "
        "+ 1); }).map(t => t.textContent).join()"
    )
    for width in (390, 1000):
        assert ask(tmp_path, text, cut, width=width) == ""


def test_the_theme_follows_the_system_and_the_button(text, tmp_path):
    dark = ask(tmp_path, text, PAPER, options=DARK)
    assert (dark, ask(tmp_path, text, PAPER, options=LIGHT)) == (
        "rgb(15, 19, 23)",
        "rgb(247, 247, 244)",
    )
    pressed = f"(document.getElementById('theme').click(), {PAPER})"
    assert ask(tmp_path, text, pressed, options=LIGHT) == dark


def test_the_page_fetches_nothing_and_its_policy_would_refuse_it(text, tmp_path):
    assert ask(tmp_path, text, "performance.getEntriesByType('resource').length") == "0"
    refused = text.replace("<main>", f'<main><img id="i" src="{PIXEL}">')
    loaded = "document.getElementById('i').naturalWidth"
    assert ask(tmp_path, refused, loaded) == "0"
    allowed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", refused)
    assert ask(tmp_path, allowed, loaded) == "1"


def test_it_prints_on_paper(text, tmp_path):
    (tmp_path / "page.html").write_text(text)
    target = tmp_path / "page.pdf"
    browse(tmp_path, tmp_path / "page.html", f"--print-to-pdf={target}", *DARK)
    content = target.read_bytes()
    assert content.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 6
