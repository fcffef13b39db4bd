"""Every module with stored data is a module as torch's own are: kept, moved, copied, restored."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from case_loops import for_each
from quantised_cases import INPUTS, OUTPUTS, codes_of, linear, quantised
from struck import kinds, same_bits
from torch import nn

from holdfast import ConfigError, UncorrectableFault
from holdfast.digest.tensors import state_digest
from holdfast.nn import FrozenEmbeddingBag, Int8EmbeddingBag, Int8Linear, Int8QuantizedLinear

ROWS, DIM = 50, 32
X = torch.randn(6, INPUTS, generator=torch.Generator().manual_seed(1))
INDICES = torch.arange(ROWS).view(5, 10)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated.*")  # torch's quantised tensors
        yield


def bag(seed: int = 0) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(ROWS, DIM, mode="sum")


def quint8() -> torch.Tensor:
    return torch.quantize_per_tensor(X.clamp(-1.9, 1.9), 0.03, 63, torch.quint8)


@dataclass
class Case:
    """A layer, another one like it with other values, and what they are called with."""

    make: Callable[[], Any]
    other: Callable[[], Any]
    given: Callable[[], torch.Tensor]
    stored: str  # the buffer with the data
    source: Callable[[], Callable[[int], torch.Tensor]]

    def run(self, layer: nn.Module) -> torch.Tensor:
        return codes_of(layer(self.given()))

    def data(self, layer: nn.Module) -> torch.Tensor:
        return dict(layer.named_buffers())[self.stored]

    def damage(self, layer: nn.Module) -> None:
        """Change more than checksums locate."""
        data = self.data(layer)
        part = data[:20, :9] if data.dim() == 2 else data[:900]
        part ^= 90


def of_linear(**options: Any) -> Case:
    return Case(
        lambda: Int8Linear.from_float(linear(), **options),
        lambda: Int8Linear(INPUTS, OUTPUTS, **options),
        lambda: X,
        "packed",
        lambda: lambda output: linear().weight[output],
    )


def of_quantised(kind: str, inner: str = "", **options: Any) -> Case:
    made = Int8QuantizedLinear if inner else Int8Linear
    return Case(
        lambda: made.from_quantized(quantised(kind, **options)),
        lambda: (
            Int8QuantizedLinear(Int8Linear(INPUTS, OUTPUTS), 1.0, 0)
            if inner
            else Int8Linear(INPUTS, OUTPUTS)
        ),
        quint8 if inner else lambda: X,
        f"{inner}packed",
        lambda: lambda output: quantised(kind, **options).weight()[output].int_repr(),
    )


def of_bag(made: Any, *options: Any, **named: Any) -> Case:
    return Case(
        lambda: made.from_float(bag(), *options, **named),
        lambda: made(ROWS, DIM, *options, mode="sum", **named),
        lambda: INDICES,
        "rows",
        lambda: lambda row: bag().weight[row],
    )


CASES = {
    "linear": of_linear(),
    "linear, mod127": of_linear(encoding="mod127"),
    "linear, static": of_linear(input_scale=0.05, input_zero_point=128, per_channel=False),
    "from dynamic, relu": of_quantised("dynamic", relu=True),
    "quantised": of_quantised("static", "linear.", per_channel=True),
    "bag, fp32": of_bag(FrozenEmbeddingBag),
    "bag, bf16": of_bag(FrozenEmbeddingBag, kind="bfloat16"),
    "bag, 8 bits": of_bag(Int8EmbeddingBag, 8),
    "bag, 4 bits": of_bag(Int8EmbeddingBag, 4),
}
every_case = for_each("name", CASES)


@every_case
def test_the_data_are_buffers_and_a_fault_in_them_is_repaired(name: str) -> None:
    case = CASES[name]
    layer = case.make()
    assert list(layer.parameters()) == []
    assert {buffer.device.type for buffer in layer.buffers()} == {"cpu"}
    stored = sum(value.nbytes for value in layer.state_dict().values() if hasattr(value, "nbytes"))
    assert stored * 0.9 <= sum(buffer.nbytes for buffer in layer.buffers())
    if "mod127" in name:
        layer.register_source(case.source())  # its checks find, and do not locate
    clean, data = case.run(layer), case.data(layer).clone()
    case.data(layer).view(-1)[7] ^= 64
    assert torch.equal(case.run(layer), clean)
    assert torch.equal(case.data(layer), data)
    assert kinds()[0] in ("operand_fault", "row_fault")


@every_case
@for_each("assign", [False, True])
def test_a_state_dict_goes_round_bit_for_bit(name: str, assign: bool) -> None:
    case = CASES[name]
    layer, other, file = case.make(), case.other(), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert not torch.equal(case.run(other), case.run(layer))
    other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert state_digest(other.state_dict()) == state_digest(layer.state_dict())
    assert torch.equal(case.run(other), case.run(layer))


@every_case
def test_casts_change_no_bit(name: str) -> None:
    case = CASES[name]
    layer = case.make()
    clean, state = case.run(layer), state_digest(layer.state_dict())
    for cast in (layer.half, layer.double, layer.bfloat16, layer.cpu):
        assert cast() is layer
    assert layer.to("cpu", torch.float16) is layer
    assert state_digest(layer.state_dict()) == state
    assert torch.equal(case.run(layer), clean)


@every_case
@for_each("constructed", [False, True])
@for_each("assign", [False, True])
def test_on_meta_it_has_no_values_until_they_are_loaded(
    name: str, constructed: bool, assign: bool
) -> None:
    case = CASES[name]
    right = case.make()
    if constructed and "quantised" not in name and "dynamic" not in name:
        with torch.device("meta"):
            layer = case.other()
    else:
        layer = case.make().to("meta")
    layer.register_source(case.source())
    assert {buffer.device.type for buffer in layer.buffers()} == {"meta"}
    shapes = {key: value.shape for key, value in _tensors(right).items()}
    assert {key: value.shape for key, value in _tensors(layer).items()} == shapes
    with pytest.raises(ConfigError, match="on meta"):
        layer(case.given())
    with pytest.raises(NotImplementedError, match="meta"):
        layer.to("cpu")
    with pytest.warns(UserWarning, match="meta"):
        layer.load_state_dict(right.state_dict())
    if not assign:
        assert layer.to_empty(device="cpu") is layer
        if isinstance(layer, Int8Linear):
            with pytest.raises(ConfigError, match="no values"):
                layer(case.given())
    layer.load_state_dict(right.state_dict(), assign=assign)
    assert state_digest(layer.state_dict()) == state_digest(right.state_dict())
    assert torch.equal(case.run(layer), case.run(right))
    case.data(layer).view(-1)[7] ^= 64
    assert torch.equal(case.run(layer), case.run(right))


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in layer.state_dict().items() if isinstance(v, torch.Tensor)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@every_case
def test_without_cuda_it_says_what_torchs_own_say(name: str) -> None:
    case = CASES[name]
    layer = case.make()
    clean = case.run(layer)
    with pytest.raises((AssertionError, RuntimeError)) as theirs:
        nn.Linear(2, 2).to("cuda")
    with pytest.raises(type(theirs.value)) as ours:
        layer.to("cuda")
    assert str(ours.value) == str(theirs.value)
    assert torch.equal(case.run(layer), clean)


@every_case
def test_copies_are_their_own_and_keep_the_source(name: str) -> None:
    case = CASES[name]
    layer = case.make()
    clean, source = case.run(layer), case.source()
    layer.register_source(source)
    for copied in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        other = copied(layer)
        assert state_digest(other.state_dict()) == state_digest(layer.state_dict())
        if copied is not copy.deepcopy:
            other.register_source(source)  # no pickle has it
        data = case.data(other).clone()
        case.damage(other)
        assert torch.equal(case.run(layer), clean)
        assert torch.equal(case.run(other), clean)
        assert torch.equal(case.data(other), data)


@every_case
def test_what_checksums_cannot_repair_comes_from_the_source(name: str) -> None:
    case = CASES[name]
    layer = case.make()
    clean, data = case.run(layer), case.data(layer).clone()
    case.damage(layer)
    struck = case.data(layer).clone()
    assert not torch.equal(struck, data)
    with pytest.raises(UncorrectableFault, match=r"register_source"):
        layer(case.given())
    layer.register_source(case.source())
    assert torch.equal(case.run(layer), clean)
    assert torch.equal(case.data(layer), data)
    layer.register_source(None)
    case.damage(layer)
    with pytest.raises(UncorrectableFault, match=r"register_source"):
        layer(case.given())


@every_case
def test_damaged_data_that_are_loaded_again_serve(name: str) -> None:
    case = CASES[name]
    layer = case.make()
    clean, state = case.run(layer), copy.deepcopy(layer.state_dict())
    case.damage(layer)
    layer.load_state_dict(state)
    assert torch.equal(case.run(layer), clean)
    assert kinds() == []


@for_each(
    ("convert", "given", "message"),
    [
        (Int8Linear.from_float, nn.ReLU(), r"torch.nn.Linear, not .*\.ReLU: .*from_quantized"),
        (Int8Linear.from_quantized, nn.Linear(2, 2), r"Linear or .*, not .*\.Linear: from_float"),
        (Int8EmbeddingBag.from_float, nn.Embedding(2, 2), r"not .*\.Embedding: .*from_pretrained"),
        (FrozenEmbeddingBag.from_float, nn.Linear(2, 2), r"not .*\.Linear: .*the bag in floats"),
        (
            Int8EmbeddingBag.from_float,
            torch.ao.nn.quantized.EmbeddingBag(2, 8),
            r"not .*quantized.*\.EmbeddingBag: give the bag in floats",
        ),
    ],
)
def test_a_module_that_cannot_be_converted_is_named_with_what_to_give(
    convert: Callable[[nn.Module], object], given: nn.Module, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        convert(given)


def test_a_weight_that_changes_while_it_is_moved_is_not_served() -> None:
    layer = Int8Linear.from_float(linear())

    def moving(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.clone()
        if moved.numel() > 900:  # the weight
            moved.view(-1)[900] += 1
        return moved

    layer._apply(moving)
    with pytest.raises(ConfigError, match="no values"):
        layer(X)
    exact = Int8Linear.from_float(linear())
    assert same_bits(exact._apply(torch.clone)(X), Int8Linear.from_float(linear())(X))
