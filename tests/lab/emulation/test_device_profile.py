"""The paper's nodes, as data: its tables agree with each other, whatever a model's depth."""

import pytest
from case_loops import for_each

from holdfast.errors import ConfigError
from holdfast_lab.emulation.profile import (
    LOCKSTEP,
    NODES,
    PAPER_LAYERS,
    STEADY,
    SUBMODULES,
    TASKS,
    TRAINING,
    NodeProfile,
    Rhythm,
    node_profile,
)

PROFILES = [node_profile(node) for node in NODES]
SILENT_IN_LOCKSTEP = {2, 3, 12}


def test_every_layer_of_every_table_is_there() -> None:
    rows = [row for p in PROFILES for kind in (p.frequency, p.severity) for row in kind.values()]
    assert len(rows) == 2 * sum(len(profile.frequency) for profile in PROFILES)
    assert {len(row) for row in rows} == {PAPER_LAYERS}
    assert (
        sum(len(profile.frequency) for profile in PROFILES) == 39
    )  # entries of table 1 that are not 0


@for_each("profile", PROFILES)
def test_the_layers_give_the_means_and_the_worst_that_are_printed(profile: NodeProfile) -> None:
    for name in SUBMODULES:
        mean = profile.mean_frequency.get(name, 0.0)
        worst = profile.worst_severity.get(name, 0.0)
        frequencies = profile.frequencies(name, PAPER_LAYERS, LOCKSTEP)
        # Table 1 has three digits and was averaged before the layers were rounded to three.
        assert sum(frequencies) / PAPER_LAYERS == pytest.approx(mean, rel=6e-3)
        largest = max(profile.severity.get(name, (0.0,)))
        assert largest == pytest.approx(worst, rel=0.022)


@for_each("layers", [1, 2, 3, 4, 5, 12, 16, 24, 32])
def test_a_model_of_any_depth_has_the_same_mean_frequency(layers: int) -> None:
    for profile in PROFILES:
        for name, row in profile.frequency.items():
            scaled = profile.frequencies(name, layers, LOCKSTEP)
            assert len(scaled) == layers
            exact = layers in (1, 2, 4, 16, 32)
            slack = 1e-9 if exact else 1.0
            assert sum(scaled) / layers == pytest.approx(sum(row) / len(row), rel=slack)
            assert min(row) <= min(scaled)
            assert max(scaled) <= max(row)
            assert max(profile.severities(name, layers)) == max(profile.severity[name])


def test_nodes_are_silent_where_the_paper_saw_nothing() -> None:
    assert {p.node for p in PROFILES if p.silent(LOCKSTEP)} == SILENT_IN_LOCKSTEP
    assert not [p for p in PROFILES if p.silent(TRAINING)]
    for profile in PROFILES:
        quiet = {task for task in TASKS if profile.disagreement[task] == 0}
        assert {task for task in TASKS if profile.silent(task)} == quiet
        for task in quiet:
            assert sum(profile.frequencies("forward.attn", 4, task)) == 0
    assert node_profile(2).silent("race")
    assert not node_profile(13).silent("race")
    assert node_profile(13).silent("cosmosqa")


def test_what_is_not_printed_is_assumed_for_silent_nodes_alone() -> None:
    assert {p.node for p in PROFILES if p.assumed_frequency} == SILENT_IN_LOCKSTEP
    assert node_profile(2).frequencies("forward.attn", 2, TRAINING) == [1e-9, 1e-9]
    assert node_profile(13).frequencies("forward.attn", 2, TRAINING) == [0.0, 0.0]


def test_rhythms() -> None:
    assert node_profile(10).rhythm(TRAINING, 1.0) == STEADY
    assert node_profile(14).rhythm(TRAINING, 1.0) == STEADY
    assert node_profile(14).rhythm(LOCKSTEP, 0.1) == Rhythm(450, 4)
    assert node_profile(7).rhythm(LOCKSTEP, 1.0) == Rhythm(20, 4)
    with pytest.raises(ConfigError, match="burst of 5 in 4 steps"):
        Rhythm(4, 5)
