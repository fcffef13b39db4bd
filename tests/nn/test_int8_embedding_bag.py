"""The modules: torch's signature, round trips, and repairs through them."""

import copy
import io

import pytest
import torch
from case_loops import for_each
from struck import kinds, same_bits, struck
from torch import nn

from holdfast import ConfigError, events
from holdfast.nn import FrozenEmbeddingBag, Int8EmbeddingBag, pool_bags


def trained(mode: str = "sum", **options: object) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(50, 32, mode=mode, **options)  # type: ignore[arg-type]


INDICES, OFFSETS = torch.arange(20), torch.tensor([0, 5, 5])


@for_each("mode", ["sum", "mean"])
@for_each(("bits", "error"), [(8, 0.02), (4, 0.3)])
def test_it_stands_in_for_torchs_own(bits: int, error: float, mode: str) -> None:
    bag = trained(mode, padding_idx=3, include_last_offset=True)
    ours = Int8EmbeddingBag.from_float(bag, bits)
    offsets = torch.tensor([0, 5, 5, 20])
    with torch.no_grad():
        expected = bag(INDICES, offsets)
    scale = 20 if mode == "sum" else 1
    assert (ours(INDICES, offsets) - expected).abs().max() < error * scale
    assert torch.equal(ours(INDICES, offsets)[1], torch.zeros(32))


def test_floats_are_taken_over_as_they_are() -> None:
    bag = trained()
    ours = FrozenEmbeddingBag.from_float(bag)
    weights = torch.rand(20)
    with torch.no_grad():
        expected = bag(INDICES, OFFSETS, weights)
    assert torch.allclose(ours(INDICES, OFFSETS, weights), expected, rtol=1e-5, atol=1e-6)
    two = INDICES.view(4, 5)
    assert torch.equal(ours(two), ours(INDICES, torch.arange(4) * 5))


def test_state_goes_round_and_is_verified() -> None:
    ours = Int8EmbeddingBag.from_float(trained())
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    other = Int8EmbeddingBag(50, 32, mode="sum")
    assert not torch.equal(other(INDICES, OFFSETS), ours(INDICES, OFFSETS))
    for assign in (False, True):
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(INDICES, OFFSETS), ours(INDICES, OFFSETS))
    other = Int8EmbeddingBag(50, 32, mode="sum")
    state["rows"][7, 3] ^= 4
    other.load_state_dict(state)
    assert torch.equal(other.rows, ours.rows)
    assert events.recent()[-1].kind == "row_fault"
    state["rows"][7, :9] ^= 255
    with pytest.raises(RuntimeError, match="row 7"):
        other.load_state_dict(state)


@for_each("copied", [copy.deepcopy, lambda bag: torch.load(_saved(bag), weights_only=False)])
def test_copies_stand_on_their_own(copied: object) -> None:
    ours = Int8EmbeddingBag.from_float(trained(), name="users")
    other = copied(ours)  # type: ignore[operator]
    expected = ours(INDICES, OFFSETS)
    ours.rows[0] = 255
    assert torch.equal(other(INDICES, OFFSETS), expected)
    assert other.table.name == "users"


def _saved(bag: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(bag, file)
    file.seek(0)
    return file


def test_a_source_restores_and_a_scrub_finds() -> None:
    bag = trained()
    ours = Int8EmbeddingBag.from_float(bag)
    clean = ours.rows.clone()
    ours.register_source(lambda row: bag.weight[row])
    ours.rows[11, :20] ^= 255
    assert ours.scrub().rotten == [11]
    assert torch.equal(ours.rows, clean)
    with ours.scrubber(1e6, passes=1) as scrubber:
        assert scrubber.join(10)[0].healthy


def test_half_output_and_names() -> None:
    ours = Int8EmbeddingBag.from_float(trained(), dtype=torch.float16)
    assert ours(INDICES, OFFSETS).dtype == torch.float16
    assert repr(ours) == "Int8EmbeddingBag(50, 32, kind=uint8, mode='sum')"


@for_each(
    ("options", "message"),
    [
        ({"bits": 2}, "8 or 4"),
        ({"mode": "max"}, "no checksum"),
        ({"padding_idx": 50}, "outside"),
    ],
)
def test_unusable_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Int8EmbeddingBag(50, 32, **options)  # type: ignore[arg-type]


def test_bags_that_cannot_be_frozen_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        Int8EmbeddingBag.from_float(trained(max_norm=1.0))
    with pytest.raises(ConfigError, match="no checksum"):
        Int8EmbeddingBag.from_float(trained("max"))


def test_it_is_on_the_cpu_only() -> None:
    with pytest.raises(ConfigError, match="CPU"):
        Int8EmbeddingBag(50, 32).to("meta")(INDICES, OFFSETS)


def many() -> tuple[list[FrozenEmbeddingBag], list[tuple[torch.Tensor, ...]]]:
    """Bags of every sort, and what they are asked for."""
    bags = [
        Int8EmbeddingBag.from_float(trained(), name="first"),
        Int8EmbeddingBag.from_float(trained("mean", padding_idx=3), 4),
        FrozenEmbeddingBag.from_float(trained(include_last_offset=True), kind="bfloat16"),
        Int8EmbeddingBag.from_float(trained(), dtype=torch.float16),
    ]
    weights = torch.linspace(-1, 1, 20)
    asked = [(INDICES, OFFSETS), (INDICES.view(4, 5),), (INDICES, torch.tensor([0, 20]))]
    return bags, [*asked, (INDICES, OFFSETS, weights)]  # type: ignore[list-item]


def test_bags_pooled_together_give_what_each_gives() -> None:
    bags, asked = many()
    apart = [bag(*given) for bag, given in zip(bags, asked, strict=True)]
    for verify in (True, False, True):
        bags[2].verify = verify
        together = pool_bags(bags, asked)
        assert same_bits(together, apart)
    assert pool_bags([], []) == []
    assert events.recent() == []


def test_a_rotten_row_is_repaired_in_bags_pooled_together_and_unchecked_gets_out() -> None:
    bags, asked = many()
    clean = pool_bags(bags, asked)
    bags[0].rows[7, 3] ^= 64
    bags[0].verify = False
    assert not torch.equal(pool_bags(bags, asked)[0], clean[0])
    assert events.recent() == []
    bags[0].verify = True
    repaired = pool_bags(bags, asked)
    assert same_bits(repaired, clean)
    assert kinds() == ["row_fault", "embedding_bag_fault"]
    assert events.recent()[0].detail["row"] == 7


def test_a_struck_sum_is_repaired_in_bags_pooled_together() -> None:
    bags, asked = many()
    clean = pool_bags(bags, asked)
    with struck((1, 2), lambda old: old + 3, site="first/embedding_bag/forward"):
        repaired = pool_bags(bags, asked)
    assert same_bits(repaired, clean)
    assert [event.op for event in events.recent()] == ["first/embedding_bag/forward"]


@for_each(
    ("given", "error", "message"),
    [
        ((INDICES + 40, OFFSETS), IndexError, "outside"),
        ((INDICES.float(), OFFSETS), TypeError, "int32"),
        ((INDICES,), ValueError, "offsets"),
    ],
)
def test_bad_input_among_good_is_refused(
    given: tuple[torch.Tensor, ...], error: type[Exception], message: str
) -> None:
    bags, asked = many()
    with pytest.raises(error, match=message):
        pool_bags(bags, [*asked[:3], given])
    with pytest.raises(ValueError, match="shorter"):
        pool_bags(bags, asked[:3])
