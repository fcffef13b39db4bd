"""The GPT, its optimizer and its schedule: shapes, paths, causality, bit-exact resumption."""

import io
import math
from typing import Any

import pytest
import torch

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


def test_unusable_optimizers_and_schedules_are_refused():
    for lr, weight_decay in ((0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (1, -1)):
        with pytest.raises(ConfigError, match=r"lr|weight_decay"):
            make_optimizer(_model(), lr, weight_decay)
    for warmup_steps, steps in ((-1, 10), (10, 10), (0, 0)):
        optimizer = make_optimizer(_model(), 1e-3, 0.1)
        with pytest.raises(ConfigError, match=f"warmup_steps = {warmup_steps} .* steps = {steps}"):
            make_schedule(optimizer, warmup_steps, steps)


def test_logits_have_the_shape_of_the_tokens_up_to_the_context():
    assert _model()(_batch()[0]).shape == (3, 12, 256)
    assert _model()(_batch(length=1)[0]).shape == (3, 1, 256)
    with pytest.raises(ValueError, match="13 tokens exceeds the context of 12"):
        _model()(_batch(length=13)[0])


def test_the_scale_of_initial_weights_falls_with_the_depth_on_the_residual_stream():
    block = _model(GPTConfig(layers=8, heads=2, width=64, context=16)).blocks[3]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for layer in (block.mlp.down, block.attn.proj):
        assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.05)


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
    assert model.head.weight is model.embed.weight


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


@pytest.mark.parametrize("stop", [1, 3, 9])
def test_a_restored_run_continues_bit_for_bit_and_learns(stop):
    def parts(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        model = GPT(SMALL)
        optimizer = make_optimizer(model, 3e-3, 0.1)
        return [model, optimizer, make_schedule(optimizer, 3, 16)]

    def train(parts: list[Any], steps: range) -> list[float]:
        model, optimizer, schedule = parts
        losses = []
        for step in steps:
            optimizer.zero_grad()
            value = loss(model, *_batch(step % 2))
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(value.item())
        return losses

    def digest(parts: list[Any]) -> str:
        return state_digest([part.state_dict() for part in parts])

    straight, resumed = parts(1), parts(2)
    train(straight, range(stop))
    saved, buffer = [part.state_dict() for part in straight], io.BytesIO()
    torch.save(saved, buffer)
    losses = train(straight, range(stop, 16))
    assert losses[-1] < losses[0] - 0.1
    buffer.seek(0)
    for part, state in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert digest(resumed) != digest(straight)
    assert train(resumed, range(stop, 16)) == losses
    assert digest(resumed) == digest(straight)
