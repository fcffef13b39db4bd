"""Campaigns on a model: what is struck, what it counts as, and that nothing is left behind."""

import csv
import json
import os
import time
from functools import partial

import pytest
import torch
from case_loops import for_each
from torch import nn

import holdfast
from holdfast import sites
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.inject import Faults, Results, campaign
from holdfast.inject.targets import WHAT


class Model(nn.Module):
    """Convolution, batch norm, embedding, attention and linear layers on a batch of images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(True))
        self.names = nn.Embedding(4, 6)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, images: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        tokens = self.body(images).flatten(2).transpose(1, 2) + self.names(names).unsqueeze(1)
        mixed, _ = self.mix(tokens, tokens, tokens, need_weights=False)
        return self.fc(self.norm(mixed).mean(1))


def setting(seed: int = 0) -> tuple[Model, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    return Model().eval(), (torch.randn(3, 3, 6, 6), torch.randint(4, (3,)))


def linear(size: int = 4) -> nn.Linear:
    layer = nn.Linear(size, size)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(size))
        layer.bias.fill_(0.5)
    return layer.eval()


def only(faults: Faults, model: nn.Module, inputs: torch.Tensor, **settings: object) -> dict:
    """The one trial of a campaign, with the outputs of the run as a list."""
    seen = []

    def outcome(golden: torch.Tensor, outputs: torch.Tensor) -> bool:
        seen.append(outputs.tolist())
        return torch.equal(golden, outputs)

    (row,) = campaign(model, inputs, faults=faults, trials=1, outcome=outcome, **settings).rows
    return row | {"outputs": seen[-1]}


def step_of(optimizer: torch.optim.Optimizer):
    def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        loss = model(*batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss, *model.parameters()]

    return step


def test_a_training_step_is_struck_everywhere_and_everything_is_put_back():
    model, batch = setting()
    model.train()
    model.names.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    step = step_of(optimizer)
    step(model, batch)
    optimizer.zero_grad()
    before = state_digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    drawn, inputs = torch.get_rng_state(), batch[0].clone()
    faults = [Faults("flip-30-up", what) for what in WHAT if what not in ("product", "buffer")]
    found = campaign(
        model, batch, run=step, optimizer=optimizer, faults=faults, trials=36, outcome="equal"
    )
    after = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert state_digest(after) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(batch[0], inputs)
    assert not sites.armed()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for sums in found.summary("what"):
        assert sums["trials"] >= 5
        assert sums["silent"] > 0, sums
    layers = {row["layer"] for row in found.rows}
    assert {"body.0", "body.1", "names", "norm", "fc"} <= layers


def test_without_a_fault_in_it_a_run_is_the_golden_run():
    model, batch = setting()
    same = lambda values, generator: values  # noqa: E731
    every = [Faults(same, what) for what in ("activation", "input", "weight", "bias", "buffer")]
    found = campaign(model, batch, faults=every, trials=50, outcome="equal")
    assert found.rate("masked").count == 50


@for_each(
    ("faults", "wanted"),
    [
        (Faults("value=7", index=(1, 2)), [[1.5] * 4, [1.5, 1.5, 7, 1.5], [1.5] * 4]),
        (Faults("zero_row", index=(1, 0)), [[1.5] * 4, [0.0] * 4, [1.5] * 4]),
        (Faults("bias_only", index=(1, 0)), [[1.5] * 4, [0.5] * 4, [0.5] * 4]),
        (Faults("zero_tile", index=(1, 1)), [[1.5] * 4, *[[1.5, 0.0, 0.0, 0.0]] * 2]),
        (Faults("value=7", "input", index=(2, 0)), [*[[1.5] * 4] * 2, [7.5, 1.5, 1.5, 1.5]]),
        (Faults("value=7", "weight", index=(3, 0)), [[1.5, 1.5, 1.5, 8.5]] * 3),
        (Faults("zero_row", "weight", index=(3, 0)), [[1.5, 1.5, 1.5, 0.5]] * 3),
        (Faults("value=7", "bias", index=(3,)), [[1.5, 1.5, 1.5, 8.0]] * 3),
        (Faults("flip-31", "bias", index=(3,)), [[1.5, 1.5, 1.5, 0.5]] * 3),
    ],
)
def test_a_fault_changes_these_elements_and_no_others(faults, wanted):
    row = only(faults, linear(), torch.ones(3, 4))
    assert row["outputs"] == wanted
    assert row["outcome"] == "silent"
    assert tuple(row["index"]) == faults.index


def test_every_sample_gets_the_same_location_or_one_of_its_own():
    for index in ("same", "each"):
        row = only(Faults("value=7", index=index), linear(16), torch.ones(8, 16))
        places = [sample.index(7) for sample in row["outputs"]]
        assert all(sample.count(7) == 1 for sample in row["outputs"])
        assert (len(set(places)) > 1) == (index == "each")
        assert row["elements"] == 8


def test_flips_strike_only_where_the_bit_can_flip_and_say_so_otherwise():
    model, inputs = linear(), torch.ones(3, 4)
    rows = campaign(model, inputs, faults=Faults("flip-30-up", "weight"), trials=20).rows
    assert all(row["before"] < 2 <= row["after"] for row in rows)
    with torch.no_grad():
        model.weight.fill_(4.0)
    found = campaign(model, inputs, faults=Faults("flip-30-up", "weight"), trials=3)
    assert [row["outcome"] for row in found.rows] == ["not_injected"] * 3
    assert found.rate("silent").trials == 0


def test_several_bits_flip_and_values_stay_in_their_range():
    kinds = ("flips-3", "uniform=2:3", "zero")
    rows = campaign(linear(), torch.ones(3, 4), faults=map(Faults, kinds), trials=60).rows
    bits = [torch.tensor([row["before"], row["after"]]).view(torch.int32) for row in rows[:20]]
    assert {(int(a ^ b) & 0xFFFFFFFF).bit_count() for a, b in bits} == {3}
    assert all(2 <= row["after"] <= 3 for row in rows[20:40])
    assert {row["after"] for row in rows[40:]} == {0.0}


def test_rows_depend_on_the_seed_only_and_survive_interruptions(tmp_path):
    model, batch = setting()
    faults = ["flip", Faults("flip", "weight")]
    whole = campaign(model, batch, faults=faults, trials=40, seed=1)
    assert str(campaign(model, batch, faults=faults, trials=40, seed=2)) != str(whole)

    class Stopped(Exception):
        pass

    calls = 0

    def stopping(model: nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        with torch.no_grad():
            return model(*given)

    again, path = {"faults": faults, "trials": 40, "seed": 1}, tmp_path / "trials.jsonl"
    with pytest.raises(KeyboardInterrupt):
        campaign(model, batch, run=stopping, resume=path, **again)
    kept = len(path.read_text().splitlines()) - 1
    assert 0 < kept < 40
    calls = 100
    continued = campaign(model, batch, run=stopping, resume=path, **again)
    assert calls == 103 + 40 - kept  # three runs without a fault
    assert repr(continued.rows) == repr(whole.rows)
    with pytest.raises(ConfigError, match="of another campaign"):
        campaign(model, batch, resume=path, faults=faults, trials=40, seed=3)


def fragile(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A run that large values kill, stop or hold up."""
    with torch.no_grad():
        largest = model(batch).max()
    if largest == 100:
        raise IndexError("out of range")
    if largest == 200:
        time.sleep(60)
    if largest == 300:
        os._exit(7)
    return largest


def test_errors_are_crashes_and_long_runs_hang():
    kinds = [Faults("value=100"), Faults("value=200"), Faults("value=2")]
    found = campaign(linear(), torch.ones(2, 4), run=fragile, faults=kinds, trials=3, timeout_s=0.3)
    assert [row["outcome"] for row in found.rows] == ["crash", "hang", "silent"]
    assert found.rows[0]["detail"] == "IndexError: out of range"


@pytest.mark.representative
@pytest.mark.processes
def test_workers_give_the_same_rows_and_outlive_dying_trials():
    model, batch = setting()
    with holdfast.protect(model):
        faults = [Faults("flip-30", what) for what in ("product", "weight", "activation")]
        one, two = (campaign(model, batch, faults=faults, trials=12, workers=w) for w in (1, 2))
    assert repr(two.rows) == repr(one.rows)
    kinds = [Faults("value=300"), Faults("value=2")]
    found = campaign(linear(), torch.ones(2, 4), run=fragile, faults=kinds, trials=6, workers=2)
    assert [row["outcome"] for row in found.rows] == ["crash"] * 3 + ["silent"] * 3
    assert found.rows[0]["detail"] == "the process died (exit code 7)"


def test_what_protection_repairs_is_corrected_and_what_it_reports_is_detected():
    model, batch = setting()
    product, weight = Faults("flip-30-up", "product"), Faults("flip-30-up", "weight", "fc")
    with holdfast.protect(model, convolutions=1.0):
        found = campaign(model, batch, faults=[product, weight, "zero"], trials=30)
    assert found.rate("corrected", what="product").count == 10
    assert found.rate("detected", what="weight").count == 10
    assert {row["detail"] for row in found.rows[:10]} == {"gemm_fault"}
    assert {row["layer"] for row in found.rows[:10]} >= {"mix", "fc"}
    unprotected = campaign(model, batch, faults=weight, trials=10, outcome="equal")
    assert unprotected.rate("silent").count == 10
    with pytest.raises(ConfigError, match="protect the model"):
        campaign(model, batch, faults=product, trials=1)


def test_a_loader_gives_a_batch_to_each_trial_and_an_outcome_may_name_classes():
    model, batch = setting()
    batches = [batch, tuple(each.flip(0) for each in batch)]
    found = campaign(
        model,
        torch.utils.data.DataLoader(batches, batch_size=None),
        trials=40,
        outcome=lambda golden, outputs: torch.equal(golden, outputs) or "another",
    )
    assert {row["batch"] for row in found.rows} == {0, 1}
    assert {row["outcome"] for row in found.rows} == {"masked", "another"}
    assert found.summary("fault")[0]["another"] == found.rate("another").count
    named = {"images": batch[0], "names": batch[1]}
    assert campaign(model, named, trials=2, per_layer=True, faults=Faults(layers=nn.Linear)).rows


def test_layers_that_torch_fuses_where_there_are_no_hooks_are_the_same_in_every_run():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    same = lambda values, generator: values  # noqa: E731
    faults = [Faults(same, "weight"), Faults(same, "activation")]
    found = campaign(model, torch.randn(2, 5, 8), faults=faults, trials=12, outcome="equal")
    assert found.rate("masked").count == 12


def test_calls_of_a_layer_that_is_used_twice_are_struck_alike():
    shared = nn.Linear(4, 4)
    model, seen = nn.Sequential(shared, nn.Tanh(), shared).eval(), []
    faults = Faults("value=7", layers=nn.Linear, index=(0, 0))

    def outcome(golden: torch.Tensor, outputs: torch.Tensor) -> bool:
        seen.append(outputs[0, 0] == 7)
        return torch.equal(golden, outputs)

    rows = campaign(model, torch.ones(1, 4), faults=faults, trials=20, outcome=outcome).rows
    assert {row["call"] for row in rows} == {0, 1}
    assert [row["call"] == 1 for row in rows] == seen[1:]


def test_results_are_written_read_and_drawn(tmp_path):
    model, batch = setting()
    found = campaign(model, batch, faults=["flip-30", "zero"], trials=40)
    found.to_csv(tmp_path / "trials.csv")
    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == [row["outcome"] for row in found.rows]
    found.to_parquet(tmp_path / "trials.parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    assert parquet.read_table(tmp_path / "trials.parquet").num_rows == 40
    found.plot(tmp_path / "outcomes.png")
    assert (tmp_path / "outcomes.png").read_bytes()[1:4] == b"PNG"
    for sums in found.summary():
        assert sums["silent_low"] <= sums["silent_rate"] <= sums["silent_high"]
        assert sums["trials"] == sum(sums[name] for name in found.outcomes)
    assert "body.0" in str(found)
    assert json.loads(json.dumps(found.summary("fault")))


def test_two_golden_runs_that_differ_are_refused():
    model, batch = linear(), torch.ones(2, 4)
    calls = iter(range(100))
    with pytest.raises(ConfigError, match="without a fault give other results"):
        campaign(
            model,
            batch,
            run=lambda model, batch: model(batch) + next(calls),
            trials=1,
            outcome="equal",
        )


@for_each(
    ("settings", "said"),
    [
        ({"faults": "flop"}, "unknown fault 'flop'; valid: flip, zero"),
        ({"faults": Faults(layers="layer9.*")}, "no layer of the model fits .* with activation: "),
        ({"trials": 0}, "trials = 0 and workers = 1 must be at least 1"),
        ({"outcome": "same"}, "outcome = 'same'; use a function or one of argmax"),
        ({"faults": Faults(index=(9, 9))}, r"cannot inject .* index \[9, 9\] is outside"),
        ({"inputs": []}, "inputs has no batch"),
        ({"run": lambda model, batch: 3}, "returns int, without a tensor"),
    ],
)
def test_bad_settings_are_refused(settings, said):
    given = {"inputs": torch.ones(2, 4), "trials": 1, **settings}
    with pytest.raises(ConfigError, match=said):
        campaign(linear(), **given)


@for_each("settings", [{"what": "weights"}, {"index": "all"}, {"what": "bias", "index": "each"}])
def test_faults_of_no_kind_are_refused(settings):
    with pytest.raises(ConfigError, match=r"use one of|is for activation and input only"):
        Faults(**settings)


def test_an_empty_campaign_says_so():
    assert Results([]).rate("silent").interval == (0.0, 1.0)


class Moving(nn.Module):
    """A buffer that is replaced, and a layer that only batches of positive numbers reach."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs.div_(inputs.abs().max())
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * inputs.mean(0)
        return self.fc(inputs - self.mean) + (self.rare(inputs) if inputs.min() > 0 else 0)


def test_replaced_buffers_and_batches_changed_in_place_are_put_back():
    torch.manual_seed(0)
    model, batch = Moving(), torch.randn(3, 4)
    mean, kept = model.mean, batch.clone()
    campaign(model, batch, faults=[Faults("value=1000", "input"), "inf"], trials=12)
    assert model.calls == 0
    assert model.mean is mean
    assert not mean.any()
    assert torch.equal(batch, kept)


def test_an_optimizer_that_keeps_more_precision_than_its_parameters_gets_it_back():
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = torch.full((4, 4), 1 / 3)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.state[model.weight]["master"] += 1
        return model(batch)

    batch = torch.ones(2, 4, dtype=torch.bfloat16)
    campaign(model, batch, run=step, optimizer=optimizer, faults=Faults("flip", "weight"), trials=3)
    assert torch.equal(optimizer.state[model.weight]["master"], torch.full((4, 4), 1 / 3))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_fault_that_is_never_reached_says_so():
    batches = [torch.rand(3, 4) + 0.1, -torch.rand(3, 4)]
    found = campaign(Moving(), batches, faults=Faults(layers="rare"), trials=20)
    said = {(row["batch"], row["outcome"] == "not_injected", row["detail"]) for row in found.rows}
    assert said == {(0, False, ""), (1, True, "never reached")}


@for_each(
    ("layer", "shape", "index"),
    [
        (nn.Conv2d(3, 5, 3, padding=1), (2, 3, 7, 7), (1, 2, 0, 0)),
        (nn.BatchNorm2d(3), (2, 3, 7, 7), (1, 2, 0, 0)),
        (nn.GroupNorm(1, 3), (2, 3, 7), (1, 2, 0)),
        (nn.LayerNorm((3, 7)), (2, 3, 7), (1, 2, 0)),
    ],
)
def test_rows_that_hold_only_the_bias_hold_that_of_their_channel(layer, shape, index):
    nn.init.normal_(layer.bias)
    (row,) = campaign(
        layer.eval(), torch.randn(shape), faults=Faults("bias_only", index=index), trials=1
    ).rows
    assert row["outcome"] == "silent"
    assert row["after"] == layer.bias[(2, 0) if layer.bias.dim() > 1 else 2].item()


def test_resume_refuses_other_settings_and_another_state_and_names_them(tmp_path):
    model, batch, path = linear(), torch.ones(2, 4), tmp_path / "trials.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"trials": 4, "optimizer": optimizer, "timeout_s": 5.0, "resume": path}
    campaign(model, batch, **settings)
    campaign(model, batch, **settings)
    before = path.read_bytes()
    refused = partial(pytest.raises, ConfigError)
    for other, said in (
        ({"timeout_s": 6.0}, r"or study: timeout_s was 5.0, now it is 6.0; repeat"),
        ({"trials": 5}, "trials was 4, now it is 5"),
        ({"faults": "zero"}, "plan was "),
        ({"seed": 3}, "seed was 0, now it is 3"),
        ({"run": fragile}, "run was , now it is fragile"),
        ({"outcome": "equal"}, "outcome was _same_argmax, now it is equal"),
    ):
        with refused(match=said):
            campaign(model, batch, **settings | other)
    with refused(match="plan was "), holdfast.protect(model):
        campaign(model, batch, **settings)
    with refused(match="inputs was "):
        campaign(model, 2 * batch, **settings)
    optimizer.param_groups[0]["lr"] = 0.2
    with refused(match="model was "):
        campaign(model, batch, **settings)
    assert path.read_bytes() == before


@pytest.mark.processes
def test_a_fault_that_fits_no_tensor_is_refused_by_workers_too():
    with pytest.raises(ConfigError, match=r"index \[9, 9\] is outside"):
        campaign(linear(), torch.ones(2, 4), faults=Faults(index=(9, 9)), trials=4, workers=2)
