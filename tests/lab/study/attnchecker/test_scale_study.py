"""``attnchecker.scale``: three sizes, two networks, two prices; the verdict sees growth."""

import pytest
from study_runs import rows_of

from holdfast_lab.study import Row, Verdict
from holdfast_lab.study.attnchecker import scale


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(scale.STUDY.name)


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
        assert row.verdicts == {scale.RATIO: Verdict.COMPARED}
        assert (row.measured[scale.RATIO] < 1.1) == (words == scale.PRICES["share"])
