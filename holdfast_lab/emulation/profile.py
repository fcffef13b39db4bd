"""The fifteen unhealthy nodes of the study of silent data corruption, for a model of any depth.

The values are in ``nodes.toml``, each under the name of the table that prints it. Names of values
that are assumptions of this project begin with ``assumed``.

Source: Ma et al., "Understanding Silent Data Corruption in LLM Training" (2025).
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from holdfast.errors import ConfigError

NODES = range(1, 16)
PAPER_LAYERS = 16
# Number of values in a submodule's output of one tensor-parallel rank: 4,096 tokens of width 4,096
# (appendix B). Times the frequency, it is the expected number of wrong values of a real call.
PAPER_CALL_VALUES = 4096 * 4096

FORWARD, BACKWARD = DIRECTIONS = ("forward", "backward")
ATTENTION, FFN = PRIMITIVES = ("attn", "ffn")
SUBMODULES = tuple(f"{direction}.{part}" for direction in DIRECTIONS for part in PRIMITIVES)

LOCKSTEP, TRAINING = "lockstep", "training"
TASKS = ("cosmosqa", "mathqa", "scienceqa", "openbookqa", "boolq", "race")
SETTINGS = (LOCKSTEP, TRAINING, *TASKS)

# Assumptions: the paper prints no length of a burst, and figure 3 shows spikes.
BURST_EVERY_STEPS, BURST_STEPS = 20, 4
LOCKSTEP_STEPS = 4500  # of the paper's run in lock-step, in which node 14 had one spike


@dataclass(frozen=True)
class Rhythm:
    """The steps in which a node errs: ``steps`` successive ones of each ``every`` steps.

    The first of them is drawn anew for each ``every`` steps. If both numbers are equal, the node
    errs in every step.
    """

    every: int
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.steps <= self.every:
            raise ConfigError(f"a burst of {self.steps} in {self.every} steps: 1 to all of them")


STEADY = Rhythm(1, 1)


@dataclass(frozen=True)
class NodeProfile:
    """The published profile of an unhealthy node.

    Attributes:
        node: Number of the node, 1 to 15.
        frequency: Share of wrong values in each of 16 decoder layers, by submodule (one of
            ``SUBMODULES``), averaged over a run in lock-step (tables 6 and 7). A submodule that is
            missing is silent.
        severity: Mean |f' - f| / |f| of the wrong values of the worst call, by submodule and layer
            (tables 8 and 9).
        mean_frequency: Mean frequency over all layers, by submodule (table 1).
        worst_severity: Largest severity of all layers, by submodule (table 2).
        wcnts: Worst-case noise-to-signal ratio of the gradients, in training with synchronised
            parameters (figure 5).
        accuracy: Accuracy after fine-tuning, by task, in percent (table 5).
        disagreement: Share of answers that differ from the healthy node's, by task, in percent
            (table 5).
        steady: True if the node errs in every step, not in bursts.
        single_burst: True if it errs in one burst of a whole run in lock-step.
        start_spike: True if it errs more often in the first steps (figure 4).
        onset_step: First step of training in which it errs (section 6.2).
        loss_spikes: True if its loss spiked while it was fine-tuned on CosmosQA (figure 7).
        assumed_frequency: Assumed frequency of a node that is silent in lock-step and errs
            otherwise; 0 if frequencies are printed.
        assumed_severity: Assumed severity of such a node.
    """

    node: int
    frequency: Mapping[str, tuple[float, ...]]
    severity: Mapping[str, tuple[float, ...]]
    mean_frequency: Mapping[str, float]
    worst_severity: Mapping[str, float]
    wcnts: float
    accuracy: Mapping[str, float]
    disagreement: Mapping[str, float]
    steady: bool
    single_burst: bool
    start_spike: bool
    onset_step: int
    loss_spikes: bool
    assumed_frequency: float
    assumed_severity: float

    def silent(self, setting: str) -> bool:
        """Return whether the paper saw no error of this node in a setting, one of ``SETTINGS``."""
        if setting == LOCKSTEP:
            return not self.frequency
        return setting in TASKS and self.disagreement[setting] == 0

    def frequencies(self, submodule: str, layers: int, setting: str) -> list[float]:
        """Return the share of wrong values of a submodule in each of ``layers`` layers.

        A layer of a shallower model gets the mean of several of the paper's layers, so that the
        mean over all layers is that of table 1. A deeper model repeats layers.
        """
        if self.silent(setting):
            return [0.0] * layers
        printed = self.frequency.get(submodule)
        if printed is None:
            return [self.assumed_frequency] * layers
        parts = _shares(printed, layers)
        return [sum(part) / len(part) for part in parts]

    def severities(self, submodule: str, layers: int) -> list[float]:
        """Return the worst call's severity in each layer, the largest of its paper's layers."""
        printed = self.severity.get(submodule)
        if printed is None:
            return [self.assumed_severity] * layers
        return [max(part) for part in _shares(printed, layers)]

    def rhythm(self, setting: str, step_scale: float) -> Rhythm:
        """Return when the node errs; ``step_scale`` shortens the run that has a single burst."""
        if setting == LOCKSTEP and self.single_burst:
            run = max(BURST_STEPS, round(LOCKSTEP_STEPS * step_scale))
            return Rhythm(run, BURST_STEPS)
        return STEADY if self.steady else Rhythm(BURST_EVERY_STEPS, BURST_STEPS)


def _shares(printed: Sequence[float], layers: int) -> list[Sequence[float]]:
    """Assign the paper's layers to the model's; if the numbers do not divide, they overlap."""
    count = len(printed)
    starts = [layer * count // layers for layer in range(layers)]
    ends = [-(-(layer + 1) * count // layers) for layer in range(layers)]
    return [printed[start:end] for start, end in zip(starts, ends, strict=True)]


@cache
def published() -> dict[str, Any]:
    """Read the published profiles from the package's file."""
    text = files("holdfast_lab.emulation").joinpath("nodes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def node_profile(node: int) -> NodeProfile:
    """Return the profile of a node."""
    if node not in NODES:
        raise ConfigError(f"node = {node!r}: the paper has nodes {NODES[0]} to {NODES[-1]}")
    values = published()["node"][str(node)]
    layers = {
        kind: {name: tuple(row) for name, row in values.get(kind, {}).items()}
        for kind in ("frequency", "severity")
    }
    return NodeProfile(
        node=node,
        **layers,
        mean_frequency=values.get("mean_frequency", {}),
        worst_severity=values.get("worst_severity", {}),
        wcnts=values["wcnts"],
        accuracy=values["accuracy"],
        disagreement=values["disagreement"],
        steady=values["rhythm"] == "steady",
        single_burst=values.get("single_burst", False),
        start_spike=values.get("start_spike", False),
        onset_step=values.get("onset_step", 0),
        loss_spikes=values.get("loss_spikes", False),
        assumed_frequency=values.get("assumed_frequency", 0.0),
        assumed_severity=values.get("assumed_severity", 0.0),
    )
