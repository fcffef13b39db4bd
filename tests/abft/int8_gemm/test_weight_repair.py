"""What a product reads rots at any moment, in any part: it heals, and is named as what it was."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from case_loops import for_each
from int8_cases import BACKENDS, Layer
from struck import kinds

from holdfast import events
from holdfast.abft.int8_gemm.encoding import ENCODINGS
from holdfast.abft.int8_gemm.op import OUTSIDE
from holdfast.abft.int8_gemm.suspects import scrub
from holdfast.abft.int8_gemm.weights import Int8Weights, Mended
from holdfast.abft.policy import collecting
from holdfast.errors import ConfigError, UncorrectableFault


def read_by_kernels(weights: Int8Weights, part: str) -> torch.Tensor:
    """A tensor that dequantises."""
    if part == "latest":
        assert weights._last is not None
        return weights._last[1].shift
    if part == "column_sums":
        return weights._column_sums
    twice = {"scale": weights._scale, "zero_point": weights._zero, "bias": weights._bias}[part]
    assert twice is not None
    return twice.padded


PARTS = ["scale", "zero_point", "bias", "column_sums", "latest"]


@for_each("backend", BACKENDS)
@for_each("encoding", ENCODINGS)
@for_each("part", PARTS)
def test_damaged_scaling_passes_the_online_check_and_scrubbing_heals_it(
    backend: str, encoding: str, part: str
) -> None:
    layer = Layer(backend=backend, encoding=encoding, zero_points=True)
    assert torch.equal(layer.run(), layer.expected())
    struck = read_by_kernels(layer.weights, part)
    struck.view(torch.int32)[3] ^= 1 << 20
    if part != "latest":
        layer.run(a_scale=0.5)  # the scales of a call are made of them
    assert not torch.equal(layer.run(), layer.expected())
    assert not kinds()
    assert not layer.weights.intact()
    assert scrub(layer.weights, OUTSIDE)
    assert kinds() == ["operand_fault"]
    assert events.recent()[0].detail["part"] == "scaling"
    assert torch.equal(layer.run(), layer.expected())
    assert not scrub(layer.weights, OUTSIDE)
    assert kinds() == ["operand_fault"]


@for_each("per_channel", [False, True])
def test_what_is_saved_heals_from_what_the_kernels_read(per_channel: bool) -> None:
    layer = Layer(zero_points=True, per_channel=per_channel)
    before = [
        t.clone() for t in (layer.weights.scale, layer.weights.bias, layer.weights.zero_point)
    ]
    layer.weights.scale.view(torch.int32)[0] ^= 1 << 24
    layer.weights.bias.view(torch.int32)[9] ^= 1 << 24
    layer.weights.zero_point[0] ^= 32
    assert layer.weights.heal() == []
    after = (layer.weights.scale, layer.weights.bias, layer.weights.zero_point)
    assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True))


@for_each("backend", BACKENDS)
@for_each(
    "damaged",
    [
        [(9, 3), (9, 40)],  # of one input
        [(9, 3), (12, 3)],  # of one output
        [(9, 3), (9, 40), (9, 41)],
        [(9, 3), (9, 40), (12, 3), (20, 40), (20, 1)],  # none is alone at first but the last
        [(k, 3) for k in range(30)] + [(50, j) for j in range(4, 40)],
    ],
)
@for_each("bits", [64, -128, -3])
def test_changed_weights_of_one_input_or_output_are_located_one_after_the_other(
    backend: str, damaged: list[tuple[int, int]], bits: int
) -> None:
    layer = Layer(backend=backend)
    packed = layer.weights.gemm.buffer.clone()
    for k, j in damaged:
        layer.flip(k, j, bits)
    assert not torch.equal(layer.weights.gemm.buffer, packed)
    assert torch.equal(layer.run(), layer.expected())
    assert torch.equal(layer.weights.gemm.buffer, packed)
    assert kinds() == ["operand_fault"] * len(damaged)
    named = sorted(tuple(event.detail["index"]) for event in events.recent())
    assert named == sorted(damaged)


SQUARE = [(9, 3), (9, 40), (12, 3), (12, 40)]


@for_each("backend", BACKENDS)
@for_each("encoding", ENCODINGS)
@for_each("stored", [False, True])
def test_weights_that_checksums_do_not_locate_come_from_the_source(
    backend: str, encoding: str, stored: bool
) -> None:
    layer = Layer(backend=backend, encoding=encoding, zero_points=True)
    packed = layer.weights.gemm.buffer.clone()
    codes, asked = layer.weight, list[int]()
    floats = (codes.float() - layer.zero_point[:, None]) * layer.scale[:, None]

    def source(output: int) -> torch.Tensor:
        asked.append(output)
        return codes[output] if stored else floats[output]

    for k, j in SQUARE:
        layer.flip(k, j)
    with pytest.raises(UncorrectableFault, match="register_source"):
        layer.run()
    events.clear()
    layer.weights.source = source
    assert torch.equal(layer.run(), layer.expected())
    assert torch.equal(layer.weights.gemm.buffer, packed)
    assert [(e.detail["method"], e.detail["row"]) for e in events.recent()] == [
        ("source", 3),
        ("source", 40),
    ]
    assert asked == ([3, 40] if encoding == "digits" else list(range(layer.n)))
    if encoding == "digits":  # the checks as well: they do not say which outputs changed
        layer.weights.checks[0, 5] ^= 1
        layer.flip(0, 0)
        assert torch.equal(layer.run(), layer.expected())
        assert layer.weights.intact()


def test_a_source_of_other_weights_is_not_taken_over() -> None:
    layer = Layer()
    for k, j in SQUARE:
        layer.flip(k, j)
    damaged = layer.weights.gemm.buffer.clone()
    layer.weights.source = lambda output: layer.weight[output] ^ 1
    with pytest.raises(UncorrectableFault, match="beyond healing"):
        layer.run()
    assert torch.equal(layer.weights.gemm.buffer, damaged)
    for given in (None, layer.weight[0].int(), layer.weight[0, :5], torch.full((100,), torch.nan)):
        layer.weights.source = lambda output, given=given: given  # type: ignore[misc]
        with pytest.raises(ConfigError, match=r"source of the weight gave .* for row 3"):
            layer.run()


@pytest.mark.usefixtures("detecting")
def test_detecting_alone_a_scrub_changes_nothing() -> None:
    layer = Layer()
    assert not scrub(layer.weights, OUTSIDE)
    layer.flip(5, 6)
    with pytest.raises(UncorrectableFault):
        scrub(layer.weights, OUTSIDE)
    assert not layer.weights.intact()


def test_both_copies_of_a_scale_damaged_cannot_be_scrubbed() -> None:
    layer = Layer()
    layer.weights.scale[0] *= 2
    layer.weights._scale.padded[1] *= 2
    with pytest.raises(UncorrectableFault, match="scaling"):
        scrub(layer.weights, OUTSIDE)
    with collecting() as deferred:
        scrub(layer.weights, OUTSIDE)
    assert [event.kind for event in deferred.unrepaired] == ["operand_fault"]


@for_each("backend", BACKENDS)
def test_what_was_made_in_inference_mode_heals(backend: str) -> None:
    with torch.inference_mode():
        layer = Layer(backend=backend)
        layer.run()
    layer.flip(5, 6)
    layer.weights._bias.padded[2] += 1
    assert torch.equal(layer.run(), layer.expected())
    assert kinds() == ["operand_fault"] * 2
    layer.weights.checks[0, 3] ^= 1
    assert torch.equal(layer.run(), layer.expected())
    assert layer.weights._last is not None
    with torch.inference_mode():
        layer.weights._last[1].shift[0] += 5
    assert layer.weights.heal() == []
    assert torch.equal(layer.run(), layer.expected())


Meanwhile = Callable[..., None]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Lets something happen before or after weights are mended, the first times that they are."""

    def arrange(layer: Layer, then: Callable[[], object], *, after: bool, times: int = 1) -> None:
        mend, left = layer.weights.mend, iter(range(times))

        def struck(column: int | None = None) -> Mended | None:
            due = next(left, None) is not None
            if due and not after:
                then()
            mended = mend(column)
            if due and after:
                then()
            return mended

        monkeypatch.setattr(layer.weights, "mend", struck)

    return arrange


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_rots_after_another_healed_is_healed_too(
    backend: str, meanwhile: Meanwhile
) -> None:
    layer = Layer(backend=backend)
    layer.flip(5, 6)
    meanwhile(layer, lambda: layer.flip(7, 8), after=True)
    assert torch.equal(layer.run(), layer.expected())
    assert layer.weights.intact()
    assert [event.detail["index"] for event in events.recent()] == [[5, 6], [7, 8]]


def test_a_weight_that_rots_for_ever_is_given_up(meanwhile: Meanwhile) -> None:
    layer = Layer()
    meanwhile(layer, lambda: layer.flip(7, 8), after=True, times=1000)
    layer.flip(5, 6)
    with pytest.raises(UncorrectableFault, match="computed again"):
        layer.run()


@pytest.mark.parametrize("part", ["weight", "checks"])
def test_what_another_thread_healed_is_named_as_memory(part: str, meanwhile: Meanwhile) -> None:
    layer = Layer()
    if part == "weight":
        layer.flip(5, 6)
    else:
        layer.weights.checks[0, 17] ^= 4
    meanwhile(layer, layer.weights.mend, after=False)
    assert torch.equal(layer.run(), layer.expected())
    assert kinds() == ["operand_fault" if part == "weight" else "checksum_fault"]
    assert events.recent()[0].detail["healed"] == "by another thread"


@for_each("part", ["weight", "checks"])
def test_threads_that_multiply_while_memory_rots_get_the_right_bits(part: str) -> None:
    layer = Layer(8, 64, 64)
    expected, stop, done = layer.expected(), threading.Event(), [0] * 4

    def work(number: int) -> None:
        while not stop.is_set():
            assert torch.equal(layer.run(), expected)
            done[number] += 1

    with ThreadPoolExecutor(len(done)) as pool:
        running = [pool.submit(work, number) for number in range(len(done))]
        try:
            for i in range(40):
                if part == "weight":
                    layer.flip(i % 64, (3 * i) % 64)
                else:
                    layer.weights.checks[0, i % 64] ^= 8
                before, deadline = list(done), time.monotonic() + 10
                # Every thread multiplies by what is struck, and is through with it before the next.
                while any(now < then + 2 for now, then in zip(done, before, strict=True)):
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
        finally:
            stop.set()
        for each in running:
            each.result()
    assert torch.equal(layer.run(), expected)
    assert layer.weights.history[part == "checks"] == 40
