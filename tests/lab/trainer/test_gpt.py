"""The GPT, its optimizer and its schedule: shapes, paths, causality, bit-exact resumption."""

import copy
import io
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer, make_schedule

SMALL = GPTConfig(layers=2, heads=2, width=16, context=12)


def _model(config: GPTConfig = SMALL) -> GPT:
    torch.manual_seed(1)
    return GPT(config)


def _batch(seed: int = 0, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(256, (3, length + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": 30, "heads": 4}, "width = 30 is not divisible by heads = 4"),
        ({"layers": 0}, "layers = 0"),
        ({"context": -3}, "context = -3"),
        ({"vocabulary": 2.5}, r"vocabulary = 2\.5"),
        ({"dropout": 1.0}, r"dropout = 1\.0"),
        ({"dropout": -0.1}, r"dropout = -0\.1"),
        ({"dropout": math.nan}, "dropout = nan"),
    ],
)
def test_impossible_sizes_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        GPTConfig(**values)


def test_module_paths():
    paths = {name for name, module in _model().named_modules() if list(module.parameters(False))}
    blocks = {
        f"blocks.{layer}.{name}"
        for layer in range(2)
        for name in ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.up", "mlp.down")
    }
    assert paths == {"embed", "positions", "ln_f", "head"} | blocks


def test_logits_have_the_shape_of_the_tokens_and_the_vocabulary():
    assert _model()(_batch()[0]).shape == (3, 12, 256)
    assert _model()(_batch(length=1)[0]).shape == (3, 1, 256)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="13 tokens exceeds the context of 12"):
        _model()(_batch(length=13)[0])


def test_the_head_shares_the_embedding():
    model = _model()
    assert model.head.weight is model.embed.weight
    assert model.head.bias is None
    assert "mask" not in "".join(model.state_dict())


@torch.no_grad()
def test_later_tokens_do_not_change_earlier_logits():
    model = _model().eval()
    tokens, _ = _batch()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])
    assert not torch.equal(before[:, 8], after[:, 8])


@torch.no_grad()
def test_attention_agrees_with_torch():
    attention = _model().blocks[0].attn.double()
    x = torch.randn(3, 12, 16, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, dim=-1)
    split = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (query, key, value)]
    mixed = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True)
    expected = attention.proj(mixed.transpose(1, 2).flatten(2))
    assert (attention(x) - expected).abs().max() <= 1e-14 * expected.abs().max() * 16


def test_initial_scale():
    model = _model(GPTConfig(layers=8, heads=2, width=64, context=16))
    residual = 0.02 / math.sqrt(16)
    assert model.blocks[3].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[3].mlp.down.weight.std().item() == pytest.approx(residual, rel=0.05)
    assert model.blocks[3].attn.proj.weight.std().item() == pytest.approx(residual, rel=0.05)
    assert model.blocks[3].mlp.up.bias.count_nonzero() == 0
    assert torch.equal(model.ln_f.weight, torch.ones(64))
    inputs, targets = _batch()
    assert loss(model, inputs, targets).item() == pytest.approx(math.log(256), abs=0.05)


class _Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_attention_runs_as_two_batched_matmuls_a_block():
    with _Matmuls() as seen:
        _model()(_batch()[0])
    assert seen.names.count("bmm") == 2 * SMALL.layers
    assert seen.names.count("addmm") == 4 * SMALL.layers
    assert seen.names.count("mm") == 1


def test_dropout_is_active_only_in_training():
    model = _model(GPTConfig(layers=1, heads=2, width=16, context=12, dropout=0.5))
    tokens, _ = _batch()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_only_matrices_decay_and_every_parameter_is_optimised_once():
    model = _model()
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups)
    expected = {id(p): 0.1 if p.dim() >= 2 else 0.0 for p in model.parameters()}
    assert decay == expected
    assert 0.0 in expected.values()


@pytest.mark.parametrize(
    ("lr", "weight_decay"), [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (1, -1)]
)
def test_unusable_optimizer_settings_are_refused(lr, weight_decay):
    with pytest.raises(ConfigError, match=r"lr|weight_decay"):
        make_optimizer(_model(), lr, weight_decay)


@pytest.mark.parametrize(("warmup_steps", "steps"), [(-1, 10), (10, 10), (0, 0)])
def test_unusable_schedules_are_refused(warmup_steps, steps):
    optimizer = make_optimizer(_model(), 1e-3, 0.1)
    with pytest.raises(ConfigError, match=f"warmup_steps = {warmup_steps} .* steps = {steps}"):
        make_schedule(optimizer, warmup_steps, steps)


def _rates(warmup_steps: int, steps: int, count: int) -> list[float]:
    optimizer = make_optimizer(_model(), 1.0, 0.0)
    schedule = make_schedule(optimizer, warmup_steps, steps)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_the_rate_warms_up_then_falls_to_a_tenth():
    rates = _rates(4, 20, 25)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:21] == sorted(rates[4:21], reverse=True)
    assert rates[12] == pytest.approx(0.55)
    assert rates[20:] == pytest.approx([0.1] * 5)
    assert _rates(0, 4, 1) == [1.0]


def _train(parts, steps: range) -> None:
    model, optimizer, schedule = parts
    for step in steps:
        optimizer.zero_grad()
        loss(model, *_batch(step)).backward()
        optimizer.step()
        schedule.step()


def _parts(seed: int):
    torch.manual_seed(seed)
    model = GPT(SMALL)
    optimizer = make_optimizer(model, 3e-3, 0.1)
    return model, optimizer, make_schedule(optimizer, 3, 16)


def _digest(parts) -> str:
    return state_digest([part.state_dict() for part in parts])


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 9])
def test_a_restored_run_continues_bit_for_bit(stop):
    straight = _parts(1)
    _train(straight, range(stop))
    saved = copy.deepcopy([part.state_dict() for part in straight])
    _train(straight, range(stop, 16))
    resumed = _parts(2)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    assert _digest(resumed) != _digest(straight)
    _train(resumed, range(stop, 16))
    assert _digest(resumed) == _digest(straight)


def _leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def test_the_schedule_state_holds_plain_values_only():
    schedule = _parts(1)[2]
    leaves = _leaves(schedule.state_dict())
    assert len(leaves) >= 4
    assert {type(leaf) for leaf in leaves} <= {int, float, bool, str, type(None)}
    buffer = io.BytesIO()
    torch.save(schedule.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == schedule.state_dict()


def test_the_model_learns():
    parts = _parts(1)
    inputs, targets = _batch()
    before = loss(parts[0], inputs, targets).item()
    for _ in range(16):
        parts[1].zero_grad()
        loss(parts[0], inputs, targets).backward()
        parts[1].step()
    assert loss(parts[0], inputs, targets).item() < before - 0.3
