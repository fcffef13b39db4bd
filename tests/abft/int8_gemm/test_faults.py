"""The triple of each encoding, and what becomes of a fault: right bits, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st
from int8_cases import BACKENDS, OUTPUTS, Layer, flipped
from struck import kinds, struck

from holdfast import events
from holdfast.abft import policy
from holdfast.abft.int8_gemm.encoding import ENCODINGS
from holdfast.errors import UncorrectableFault


@for_each("backend", BACKENDS)
@for_each("encoding", ENCODINGS)
@for_each("output", OUTPUTS)
def test_the_triple(backend: str, encoding: str, output: dict[str, Any]) -> None:
    layer = Layer(backend=backend, encoding=encoding, output=output)
    expected = layer.expected()
    assert torch.equal(layer.run(), expected)
    assert not kinds()
    with flipped(4, 30, 22):
        assert torch.equal(layer.run(), expected)
        assert kinds() == ["gemm_fault"]
        assert not torch.equal(layer.run(verify=False), expected)
        assert kinds() == ["gemm_fault"]


@given(
    row=st.integers(0, 8),
    column=st.integers(0, 69),
    bit=st.integers(0, 31),
    seed=st.integers(0, 1 << 30),
    encoding=st.sampled_from(ENCODINGS),
    backend=st.sampled_from(BACKENDS),
    zero_points=st.booleans(),
)
def test_any_flip_of_any_accumulator_is_corrected_and_named(
    row: int, column: int, bit: int, **options: Any
) -> None:
    events.clear()
    layer = Layer(**options)
    with flipped(row, column, bit):
        assert torch.equal(layer.run(), layer.expected())
    (event,) = events.recent()
    assert event.kind == "gemm_fault"
    assert event.rung == "correct"
    assert event.detail["index"] == [row, column]
    assert event.detail["method"] == ("checksum" if layer.encoding == "digits" else "recompute")


@for_each("backend", BACKENDS)
@for_each("encoding", ENCODINGS)
def test_several_wrong_elements_of_a_row_are_recomputed(backend: str, encoding: str) -> None:
    layer = Layer(backend=backend, encoding=encoding)

    def wrong(c: torch.Tensor) -> torch.Tensor:
        c = c.clone()
        c[2, 10] += 1000
        c[2, 20] += 1000  # with the other one, what a single error in column 15 would leave
        c[5] += 7
        return c

    with struck((slice(None), slice(None)), wrong):
        assert torch.equal(layer.run(), layer.expected())
    assert kinds() == ["gemm_fault"] * 2
    assert [event.detail["method"] for event in events.recent()] == ["recompute"] * 2
    assert [event.detail["elements"] for event in events.recent()] == [2, 70]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    row=st.integers(0, 99),
    column=st.integers(0, 69),
    bit=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_a_flipped_weight_is_named_and_healed(
    backend: str, row: int, column: int, bit: int, seed: int
) -> None:
    events.clear()
    layer = Layer(backend=backend, seed=seed)
    layer.a[3, row] = 254  # no row of the paper's encoding would see it
    buffer, before = layer.weights.gemm.buffer, layer.weights.gemm.buffer.clone()
    buffer[layer.weights.gemm.address(row, column)] ^= -128 if bit == 7 else 1 << bit
    assert not torch.equal(layer.run(verify=False), layer.expected())
    assert torch.equal(layer.run(), layer.expected())
    (event,) = events.recent()
    assert (event.kind, event.rung) == ("operand_fault", "correct")
    assert event.detail["index"] == [row, column]
    assert event.detail["repaired"] == int(layer.weight[column, row])
    assert torch.equal(buffer, before)
    assert torch.equal(layer.run(), layer.expected())
    assert len(events.recent()) == 1


@for_each("backend", BACKENDS)
@for_each("threads", [1, 4])
def test_many_changed_weights_in_different_inputs_are_healed(backend: str, threads: int) -> None:
    layer = Layer(300, 200, 100, backend=backend)
    torch.set_num_threads(threads)
    for k in range(0, 100, 7):
        layer.flip(k, 3 * k % 70)
    assert torch.equal(layer.run(), layer.expected())
    assert kinds() == ["operand_fault"] * 15


def square(layer: Layer) -> None:
    """Two changed weights in each of two inputs and two outputs."""
    for k, j in ((9, 3), (9, 40), (12, 3), (12, 40)):
        layer.flip(k, j)


def weight_and_check(layer: Layer) -> None:
    layer.flip(5, 6)
    layer.weights.weighted[0, 5] ^= 1


@for_each("backend", BACKENDS)
@for_each(
    ("encoding", "damage"),
    [*((each, square) for each in ENCODINGS), ("digits", weight_and_check)],
)
def test_what_cannot_be_healed_is_an_error(
    backend: str, encoding: str, damage: Callable[[Layer], None]
) -> None:
    layer = Layer(backend=backend, encoding=encoding)
    damage(layer)
    with pytest.raises(UncorrectableFault, match="packed weight"):
        layer.run()
    assert kinds() == ["operand_fault"]
    with policy.collecting() as deferred:
        layer.run()
    assert [event.kind for event in deferred.unrepaired] == ["operand_fault"]


@for_each("backend", BACKENDS)
@for_each("digit", [0, 1])
def test_damaged_checks_are_known_as_such_and_heal(backend: str, digit: int) -> None:
    layer = Layer(backend=backend)
    layer.weights.checks[digit, 17] ^= 4
    assert not layer.weights.intact()
    assert torch.equal(layer.run(), layer.expected())
    assert kinds() == ["checksum_fault"]
    assert layer.weights.intact()
    layer.run()
    assert kinds() == ["checksum_fault"]


@for_each("backend", BACKENDS)
def test_a_struck_check_column_of_the_paper_is_no_fault_of_the_output(backend: str) -> None:
    layer = Layer(backend=backend, encoding="mod127")
    with flipped(4, 70, 3):
        assert torch.equal(layer.run(), layer.expected())
    assert kinds() == ["checksum_fault"]


def test_a_fault_of_memory_alone_reaches_no_output_and_is_found_on_demand() -> None:
    layer = Layer()
    layer.a[:, 5] = 0
    layer.weights = layer.pack()
    layer.flip(5, 6)
    assert torch.equal(layer.run(), layer.expected())
    assert not layer.weights.intact()
    healed = layer.weights.heal()
    assert healed is not None
    assert [(each.row, each.column) for each in healed] == [(5, 6)]


def test_the_paper_misses_what_127_divides_and_digits_do_not() -> None:
    for encoding, expected in (("mod127", []), ("digits", ["operand_fault"])):
        events.clear()
        layer = Layer(m=1, encoding=encoding)
        layer.a[0, 5] = 254
        layer.flip(5, 6)
        assert torch.equal(layer.run(), layer.expected()) == (encoding == "digits")
        assert kinds() == expected


@pytest.mark.usefixtures("detecting")
@for_each("encoding", ENCODINGS)
def test_detecting_alone_changes_nothing_and_raises(encoding: str) -> None:
    layer = Layer(encoding=encoding)
    with flipped(4, 30, 22), pytest.raises(UncorrectableFault, match="row 4"):
        layer.run()
    assert kinds() == ["gemm_fault"]
