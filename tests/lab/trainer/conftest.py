"""Small runs of the trainer, and the undisturbed ones that they must end as."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.snapshot.client.at_rest import Rotation
from holdfast.step.optimizer_check import FIRST, SHARE
from holdfast_lab.trainer.gpt import GPT, GPTConfig, make_optimizer
from holdfast_lab.trainer.launch import RunResult, train
from holdfast_lab.trainer.settings import Settings

SIZES = {"layers": 1, "heads": 2, "width": 16, "context": 16}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text to train on."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("What a fault does not reach it cannot change. " * 100)
    return folder


@pytest.fixture(scope="session")
def settings(text: Path) -> Callable[..., Settings]:
    """Makes the settings of a small run."""
    common = {"batch_size": 2, "warmup_steps": 1, "data": str(text), "model": GPTConfig(**SIZES)}

    def make(mode: str = "guarded", **changes: Any) -> Settings:
        return Settings(mode=mode, **{"steps": 6} | common | changes)

    return make


@pytest.fixture(scope="session")
def calm(
    settings: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunResult]:
    """Undisturbed runs on one host by what is changed in their settings, each made once."""
    known: dict[str, RunResult] = {}

    def run(**changes: Any) -> RunResult:
        if (key := repr(changes)) not in known:
            folder = tmp_path_factory.mktemp("calm") / "run"
            known[key] = train(folder, settings("bare", **changes))
        return known[key]

    return run


@pytest.fixture(scope="session")
def in_turn() -> Callable[[GPTConfig, int], list[str]]:
    """Returns the weights that the optimizer's check computes again in a step of a run."""

    def names_at(config: GPTConfig, step: int) -> list[str]:
        model, rotation = GPT(config), Rotation()
        names = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
        held = [p for g in make_optimizer(model, 1e-3, 0.1).param_groups for p in g["params"]]
        sizes = [p.numel() for p in held]
        turns = [rotation.take(sizes, SHARE) for _ in range(step + 1)]
        smallest = sorted(range(len(sizes)), key=sizes.__getitem__)[:FIRST] if not step else []
        return [names[id(held[number])] for number in (*turns[-1], *smallest)]

    return names_at


@pytest.fixture
def command(text: Path) -> Callable[..., list[str]]:
    """Makes the command line that starts a small run."""
    common = [f"--{name}={value}" for name, value in SIZES.items()]

    def make(run_dir: Path, *more: str) -> list[str]:
        started = [sys.executable, "-m", "holdfast.cli.main", "train", f"--run-dir={run_dir}"]
        return [*started, f"--data={text}", "--batch-size=2", "--warmup-steps=1", *common, *more]

    return make
