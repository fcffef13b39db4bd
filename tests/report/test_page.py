"""The page: what it says, that nothing in a run can break it, and that it needs nothing else."""

import re
import time
from dataclasses import replace
from importlib.resources import files
from itertools import product

import pytest
from report_dom import Node, parse
from report_runs import (
    OP,
    START_S,
    corrected,
    coverage,
    event,
    repeated,
    restored,
    struck,
    write_run,
)

from holdfast.events import Event
from holdfast.report import gather, page
from holdfast.report.run import gather_run
from holdfast.report.timeline import LANES

MEGABYTES = 10**6
RUNGS = ("correct", "recompute", "rollback", "rebuild", "reload")
NASTY = "</title><script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;"


def _story(name: str = OP) -> list[Event]:
    kills = [struck(9.0, step=5, rank=r, op="", kind="kill_trainer", bit=None) for r in (0, 1)]
    return [
        *(struck(1.0, op=name), corrected(1.1, op=name)),
        *(
            struck(3.0, step=3, op="blocks.1.ln_2", site="module"),
            repeated(5.0, "transient", step=3),
        ),
        *(*kills, restored(15.0), restored(15.2, rank=1)),
        event("persisted", 20.0, step=8, rank=-1),
    ]


@pytest.fixture
def dom(tmp_path) -> Node:
    write_run(tmp_path / "calm", mode="bare")
    write_run(tmp_path / "storm", _story(), covered=coverage("head/mm/forward"))
    return parse(page(gather(tmp_path)))


def test_the_verdict_comes_first(dom):
    (verdict,) = dom.all("div", "verdict")
    assert verdict.styles == ["verdict", "good"]
    assert verdict.all("div", "level")[0].text == "✓ Good"
    assert dom.all("h1")[0].text.startswith("3 incidents, every one answered")
    assert dom.all("title")[0].children == [f"storm: {dom.all('h1')[0].text}"]
    assert verdict.all("p")[-1].text == "step 10 of 10 · 2 ranks · guarded · 5 s of steps"


def test_the_tiles_hold_the_numbers_that_matter(dom):
    tiles = {
        tile.all("div", "what")[0].text: (
            tile.all("div", "number")[0].text,
            tile.all("div", "against")[0].text,
        )
        for tile in dom.all("div", "tile")
    }
    assert tiles == {
        "steps done": ("10", "of 10, finished"),
        "incidents": ("3", "3 answered, 4 faults injected"),
        "lost to faults": ("8.22 s", "in all answers"),
        "step, median": ("500 ms", "+0.0% against calm"),
        "matmul sites covered": ("1 of 2", "50%"),
        "waited for snapshots": ("250 ms", "since the last restart, 41.7 ms a step"),
    }


def test_each_incident_is_a_row(dom):
    rows = dom.section("Faults, and what answered them").rows()
    assert [row["answered by"] for row in rows] == ["1 correct", "2 recompute", "3 roll back"]
    assert rows[0] == {
        "after": "0 s",
        "took": "20 ms",
        "step": "1",
        "rank": "0",
        "what": "bitflip bit 30 (output) wrong matrix product",
        "where": OP,
        "seen by": "checksum",
        "answered by": "1 correct",
    }
    assert rows[2]["what"] == "2 × kill trainer state restored"
    assert (rows[2]["where"], rows[2]["took"]) == ("process", "6.2 s")


def test_the_ladder_names_what_was_not_needed(dom):
    ladder = dom.section("The ladder")
    assert [(row["rung"], row["incidents"]) for row in ladder.rows()] == [
        ("1 correct", "1"),
        ("2 recompute", "1"),
        ("3 roll back", "1"),
    ]
    assert ladder.all("p")[-1].text == "Not needed: 4 rebuild, 5 reload."


def test_a_rung_that_only_helped_a_higher_one_is_not_called_unneeded(tmp_path):
    rebuilt = event("snapshot_rebuilt", 2.0, -1, detector="digest", rung="rebuild", duration_s=0.1)
    run = write_run(tmp_path, [rebuilt, restored(2.5)])
    notes = [p.text for p in parse(page(gather(run))).section("The ladder").all("p")][1:]
    assert notes == [
        "Only on the way to a higher one: 3 roll back.",
        "Not needed: 1 correct, 2 recompute, 5 reload.",
    ]


def test_the_axis_of_steps_says_how_it_counts(dom):
    (note,) = dom.section("Loss and step time").all("p", "note")
    assert note.text.startswith("The axis counts steps done, and events count from 0")


def test_suspects_have_counts_and_intervals(dom):
    device, healthy, op = dom.section("Suspects").rows()
    assert (healthy["unit"], healthy["faults"]) == ("rank 1 on node-a", "0")
    assert device["unit"] == "rank 0 on node-a (cpu)"
    assert (device["faults"], device["fair share"]) == ("2", "50%")
    assert device["share (95 %)"] == "100% (34% to 100%)"
    assert device["faulty steps, of those done (95 %)"] == "2 (5.7% to 51%)"
    assert device["by chance"] == "likely", "what the injector did is no evidence"
    assert (op["unit"], op["faults"]) == (OP, "1")


def test_coverage_says_what_is_not_covered(dom):
    section = dom.section("Coverage")
    assert "1 of 2 sites covered. 700 rows verified; 3 suspected and cleared" in section.text
    assert "The checks took 20% of the products' time." in section.text
    bare, costly = section.rows()
    assert bare == {"site": "head/mm/forward", "why": "in a compiled graph"}
    assert (costly["site"], costly["rows verified"]) == (OP, "700")


def test_the_timeline_has_a_mark_for_each_event_on_its_lane(dom):
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(START_S + 1.0))
    assert f"Wall time since {begun}." in dom.section("Timeline").text
    for name in ("wide", "narrow"):
        (drawn,) = dom.section("Timeline").all("div", name)
        lanes = [text.text for text in drawn.all("text", "lane")]
        assert lanes == [LANES[n] for n in ("struck", "correct", "recompute", "rollback", "note")]
        counts = {lane: len(drawn.all("path", lane)) for lane in ("struck", "rollback", "note")}
        assert counts["struck"] == 4
        assert len([p for p in drawn.all("path", "rollback") if "mark" in p.styles]) == 2
        assert counts["note"] == 1
    titles = [mark.all("title")[0].children[0] for mark in drawn.all("path", "mark")]
    assert f"step 1, rank 0: bitflip bit 30 (output) in {OP}" in titles
    assert f"step 1, rank 0: wrong matrix product in {OP}, seen by checksum, 20 ms" in titles


def test_both_runs_are_drawn(dom):
    drawn = dom.section("Loss and step time").all("div", "wide")
    for chart in drawn:
        assert [line.styles[1] for line in chart.all("path", "line")] == ["calm", "run"]
        assert len(chart.all("path", "fault")) == 3


def test_a_run_without_faults_has_an_empty_timeline_and_says_so(tmp_path):
    dom = parse(page(gather(write_run(tmp_path / "run", steps=60))))
    assert dom.all("h1")[0].text == "No fault in 60 steps."
    assert "No events in 60 steps" in dom.section("Timeline").text
    assert "The ladder" not in dom.text
    assert "No fault was found in any device in 60 steps." in dom.section("Suspects").text


def test_names_with_markup_in_them_are_text(tmp_path):
    run = write_run(tmp_path / "run", _story(NASTY), covered=coverage(NASTY))
    report = replace(gather_run(run), name=NASTY, path=NASTY)
    dom = parse(page(report))
    assert len(dom.all("script")) == 1
    assert dom.all("img") == []
    rows = dom.section("Faults, and what answered them").rows()
    assert rows[0]["where"] == NASTY
    assert dom.section("Coverage").rows()[0]["site"] == NASTY
    assert dom.all("header")[0].all("span")[0].text == NASTY
    assert not [a for node in _nodes(dom) for a in node.attributes if a.startswith("on")]


def _nodes(node: Node):
    for child in node.children:
        if isinstance(child, Node):
            yield child
            yield from _nodes(child)


def test_the_page_needs_nothing_else(dom, tmp_path):
    text = page(gather(tmp_path))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    metas = [meta.attributes for meta in dom.all("meta")]
    assert {"http-equiv": "Content-Security-Policy", "content": policy} in metas
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<link|<img|<iframe", text)
    fetching = {"src", "href", "srcset", "data", "action", "poster"}
    assert not [node.name for node in _nodes(dom) if node.attributes.keys() & fetching]


def test_drawings_say_what_they_show(dom):
    drawn = [svg for svg in dom.all("svg") if "aria-hidden" not in svg.attributes]
    assert drawn
    for svg in drawn:
        assert svg.attributes["role"] == "img"
        assert svg.attributes["aria-label"]
    assert dom.all("html")[0].attributes["lang"] == "en"


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(10_000, marks=pytest.mark.fuzz),
        pytest.param(50_000, marks=pytest.mark.campaign),
    ],
)
def test_a_hundred_thousand_events_fit_on_a_page(tmp_path, count):
    """And so do some less, of which a list of all would be too long already."""
    ops = [f"encoder.layers.{n % 97}.attention.projection/addmm/forward" for n in range(count)]
    events = [
        made
        for n, op in enumerate(ops)
        for made in (struck(n, step=n, rank=n % 8, op=op), corrected(n + 0.1, n, n % 8, op))
    ]
    events += [event("row_fault", n, step=n, op="x" * 5000, rung="rebuild") for n in range(150)]
    run = write_run(tmp_path / "run", events, steps=count, done=0)
    started_s = time.process_time()
    report = gather_run(run)
    text = page(report)
    assert time.process_time() - started_s < 60 * count / 50_000
    assert report.incidents_total == count + 150
    assert len(text.encode()) < 2 * MEGABYTES
    dom = parse(text)
    (drawn,) = dom.section("Timeline").all("div", "wide")
    bars = [bar.all("title")[0].children[0] for bar in drawn.all("rect", "correct")]
    assert sum(int(bar.split()[0].replace(",", "")) for bar in bars) == count
    assert f"200 gravest of {count + 150:,} incidents" in dom.text


def test_every_kind_of_state_makes_a_page(tmp_path):
    for name, options in {
        "empty": {"done": 0},
        "begun": {"done": 1},
        "bare": {"mode": "bare"},
    }.items():
        assert parse(page(gather(write_run(tmp_path / name, **options)))).text.strip(), name


def _themes() -> list[dict[str, str]]:
    """The colours of each theme, by name, from the template."""
    text = files("holdfast.report").joinpath("page.html").read_text(encoding="utf-8")
    blocks = re.findall(r":root[^{]*\{([^}]*--paper[^}]*)\}", text)
    return [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block)) for block in blocks]


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_and_marks_can_be_told_from_the_paper_in_every_theme():
    light, dark, chosen, printed = _themes()
    assert dark == chosen
    assert _contrast(light["paper"], dark["paper"]) > 10
    assert printed["paper"] == "#ffffff"
    for colours, ground in product((light, dark, printed), ("paper", "card")):
        for name in ("ink", "muted", "good", "attention", "bad"):
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        for name in ("struck", "found", "note", *RUNGS):
            assert _contrast(colours[name], colours[ground]) >= 3.0, (name, ground)
