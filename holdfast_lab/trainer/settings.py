"""All settings of a training run, as one record that is validated and stored as JSON."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from holdfast.errors import ConfigError
from holdfast.report.run_files import SETTINGS_NAME
from holdfast.text_files import UNPARSABLE
from holdfast_lab.trainer.gpt import GPTConfig

MODES = {
    "bare": "plain DDP, nothing of holdfast",
    "guarded": "protected, guarded, a snapshot every step",
    "unprotected": "faults are injected, nothing looks for them",
}
RANKS_PER_CORE = 8
DTYPES = ("fp32", "bf16")
SEEDS = range(2**32)


@dataclass(frozen=True)
class Settings:
    """A training run of the byte-level GPT.

    Attributes:
        mode: One of ``MODES``.
        steps: Number of optimizer steps.
        ranks: Number of data-parallel processes.
        nodes: Number of hosts among which the ranks are divided, emulated if more than 1.
        batch_size: Number of sequences in a batch of each rank.
        data: Folder of text; None for the running Python's standard library.
        seed: Determines weights, the order of the data and dropout.
        dtype: ``fp32``, or ``bf16`` for autocast.
        audit: Share of steps that are computed twice and compared.
        at_rest: Share of the state that is compared with its digests in each step.
        queued_checks: True to verify products as those of a GPU are, by checks that are queued
            behind them and read once a step, so that a step with a wrong product is repeated.
        persist_every: Number of steps between checkpoints in the run directory; 0 for none.

    Raises:
        ConfigError: A value is out of range; the message names it.
    """

    mode: str = "guarded"
    steps: int = 100
    ranks: int = 2
    nodes: int = 1
    batch_size: int = 8
    data: str | None = None
    seed: int = 0
    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup_steps: int = 10
    clip_grad_norm: float = 1.0
    dtype: str = "fp32"
    audit: float = 0.0
    at_rest: float = 1.0
    queued_checks: bool = False
    persist_every: int = 0
    model: GPTConfig = field(default_factory=GPTConfig)

    def __post_init__(self) -> None:
        for name, valid in (("mode", tuple(MODES)), ("dtype", DTYPES)):
            if getattr(self, name) not in valid:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} is unknown; valid: {', '.join(valid)}"
                )
        for name in ("steps", "ranks", "nodes", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.persist_every < 0:
            raise ConfigError(f"persist_every = {self.persist_every} must be 0 (never) or positive")
        cores = os.cpu_count() or 1
        if self.ranks > RANKS_PER_CORE * cores:
            raise ConfigError(
                f"ranks = {self.ranks} is too many for {cores} cores: at most "
                f"{RANKS_PER_CORE * cores}"
            )
        if self.ranks % self.nodes:
            raise ConfigError(
                f"ranks = {self.ranks} cannot be divided among nodes = {self.nodes}: change one"
            )
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigError(
                f"warmup_steps = {self.warmup_steps} must be less than steps = {self.steps}"
            )
        for name in ("audit", "at_rest"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} must be a share between 0 and 1"
                )
        if self.seed not in SEEDS:
            raise ConfigError(f"seed = {self.seed} must be at least 0 and less than {SEEDS.stop}")
        for name in ("lr", "clip_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)!r} must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay = {self.weight_decay!r} must be 0 or positive")

    def save(self, run_dir: Path) -> None:
        """Write the settings into a run directory, completely or not at all."""
        part = run_dir / f"{SETTINGS_NAME}.part"
        part.write_text(json.dumps(asdict(self), indent=2))
        os.replace(part, run_dir / SETTINGS_NAME)

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """Load the settings from a run directory.

        Raises:
            ConfigError: The directory holds no run, or its settings file is damaged.
        """
        path = run_dir / SETTINGS_NAME
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            return cls(**values | {"model": GPTConfig(**values["model"])})
        except OSError as error:
            raise ConfigError(
                f"{run_dir} holds no run: no {SETTINGS_NAME} in it; give the directory of a run"
            ) from error
        except (*UNPARSABLE, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} is not the record of a run ({error}): give another run directory"
            ) from error
