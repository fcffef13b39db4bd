"""``attnchecker.scale``: three sizes, two networks, two prices; the verdict sees growth."""

from dataclasses import replace

import pytest

from holdfast_lab.study import Row, Settings, Unwatched
from holdfast_lab.study.attnchecker import scale


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(scale.STUDY.run(Settings(), Unwatched()))


def test_the_models_have_the_sizes_of_their_names() -> None:
    for decoder in scale.DECODERS:
        assert decoder.parameters / 1e9 == pytest.approx(float(decoder.name[:-1]), rel=0.03)
        assert decoder.width == 128 * decoder.heads


def test_a_constant_share_of_attention_stays_constant_and_reading_falls(rows: list[Row]) -> None:
    spreads = {
        (row.case["checks take"], row.case["network"]): row
        for row in rows
        if row.table == scale.SPREAD
    }
    assert len(spreads) == 4
    for (words, _), row in spreads.items():
        assert row.agreement == ("within" if words == scale.PRICES["share"] else "outside")
        assert row.outside() == [] or "overhead falls" in row.explanations()[0]


def test_the_verdict_holds_and_sees_an_overhead_that_grows(rows: list[Row]) -> None:
    assert scale.STUDY.verdict(rows) == ""
    place = next(i for i, row in enumerate(rows) if row.case["model"] == "100B")
    wrong = replace(rows[place], measured={**rows[place].measured, scale.OVERHEAD: 50.0})
    broken = scale.STUDY.verdict([*rows[:place], wrong, *rows[place + 1 :]])
    assert "the overhead grows" in broken
    assert "to 50 %" in broken
