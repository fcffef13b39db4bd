"""Ranks that shadow each other: whoever errs is named and put right, and nobody else."""

from pathlib import Path
from typing import Any

import pytest
import shadow_ranks as ranks
from gloo_ranks import Ranks

from holdfast.replay.majority import is_sampled

pytestmark = pytest.mark.processes

ALWAYS = {"rate": 1.0}
ONE_GROUP = ALWAYS | {"one_group": True}
SAMPLED = {"rate": 0.3}  # with this seed: steps 2 and 4
HARDLY = {"rate": 1e-9}


def said_in(folder: Path, count: int, scenarios: list[dict[str, Any]]) -> dict[str, Any]:
    """What every rank said, by the scenario's name."""
    said = Ranks(folder / "run", count, ranks.train, scenarios).finished()
    return {s["name"]: [lines[n] for lines in said] for n, s in enumerate(scenarios)}


def named(lines: list[dict[str, Any]], kind: str = "shadow_mismatch") -> list[dict[str, Any]]:
    """The events of a kind, whichever rank recorded them."""
    return [event for line in lines for event in line["events"] if event["kind"] == kind]


def states(lines: list[dict[str, Any]]) -> list[str]:
    return [line["state"] for line in lines]


def scenario(name: str, layout: str = "ddp", **options: Any) -> dict[str, Any]:
    return {"name": name, "layout": layout, **options}


PERSISTENT = {"ranks": [1]}
FORWARD = {"ranks": [2], "passes": "forward"}
ONCE = {"ranks": [2], "only": 0}  # its own pass of the struck step
AS_SHADOW = {"ranks": [2], "only": 1}  # the pass it makes for another one
THREE = [
    scenario("bare"),
    scenario("clean", shadow=ALWAYS),
    scenario("unshadowed", fault=PERSISTENT),
    scenario("rerun alone", audit=1.0, fault=PERSISTENT),
    scenario("persistent", shadow=ALWAYS, fault=PERSISTENT),
    scenario("persistent, with reruns", shadow=ALWAYS, audit=1.0, fault=PERSISTENT),
    scenario("forward", shadow=ALWAYS, fault=FORWARD),
    scenario("once", shadow=ALWAYS, fault=ONCE),
    scenario("once, unshadowed", fault=ONCE),
    scenario("as a shadow", shadow=ALWAYS, fault=AS_SHADOW),
    scenario("sampled", shadow=SAMPLED, fault=PERSISTENT),
    scenario("sampled on", shadow=SAMPLED | {"until_evicted": False}, fault=PERSISTENT),
    scenario("infinite", shadow=HARDLY, fault=PERSISTENT | {"passes": "infinite"}),
    scenario("by hand", "by_hand"),
    scenario("by hand, persistent", "by_hand", shadow=ALWAYS, fault=PERSISTENT),
    scenario("by hand, unshadowed", "by_hand", fault=PERSISTENT),
    scenario("accumulated", accumulated=3),
    scenario("accumulated, clean", accumulated=3, shadow=ALWAYS),
    scenario("accumulated, persistent", accumulated=3, shadow=ALWAYS, fault=PERSISTENT),
    scenario("one group, clean", accumulated=3, shadow=ONE_GROUP),
    scenario("one group, persistent", accumulated=3, shadow=ONE_GROUP, fault=PERSISTENT),
    scenario("one group, as a shadow", accumulated=3, shadow=ONE_GROUP, fault=AS_SHADOW),
]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three ranks under DDP, or reducing by hand."""
    return said_in(tmp_path_factory.mktemp("three"), 3, THREE)


@pytest.mark.representative
def test_a_clean_run_accuses_nobody_and_keeps_its_bits(three: dict[str, Any]) -> None:
    for name, bare in (
        ("clean", "bare"),
        ("accumulated, clean", "accumulated"),
        ("one group, clean", "accumulated"),
    ):
        assert [line["events"] for line in three[name]] == [[]] * 3
        assert states(three[name]) == states(three[bare])
    # The pass itself and one for another; of one group, the latter is a third of a step.
    # One more settles DDP's buckets.
    assert {line["passes"] for line in three["clean"]} == {2 * ranks.STEPS + 1}


@pytest.mark.representative
def test_without_a_shadow_the_fault_reaches_the_weights_and_a_rerun_agrees_with_it(
    three: dict[str, Any],
) -> None:
    assert not set(states(three["unshadowed"])) & set(states(three["bare"]))
    assert states(three["rerun alone"]) == states(three["unshadowed"])
    assert [line["events"] for line in three["rerun alone"]] == [[]] * 3
    assert not set(states(three["once, unshadowed"])) & set(states(three["bare"]))


@pytest.mark.representative
@pytest.mark.parametrize(
    ("name", "bare", "rank"),
    [
        ("persistent", "bare", 1),
        ("persistent, with reruns", "bare", 1),
        ("forward", "bare", 2),
        ("by hand, persistent", "by hand", 1),
        ("accumulated, persistent", "accumulated", 1),
        ("one group, persistent", "accumulated", 1),
    ],
)
def test_a_device_that_agrees_with_itself_is_named_and_put_right(
    three: dict[str, Any], name: str, bare: str, rank: int
) -> None:
    found = named(three[name])
    assert {event["rank"] for event in found} == {rank}
    assert [event["step"] for event in found] == list(range(ranks.STRUCK_STEP, ranks.STEPS))
    first = found[0]
    assert (first["rung"], first["detector"], first["device"]) == ("recompute", "shadow", "cpu")
    assert first["host"]
    assert first["detail"]["own"]
    assert first["detail"]["wrong_passes"] >= 2
    (evict,) = named(three[name], "evict")
    assert (evict["rank"], evict["step"]) == (rank, ranks.STRUCK_STEP)
    assert states(three[name]) == states(three[bare])


@pytest.mark.representative
@pytest.mark.parametrize(
    ("name", "bare", "own"),
    [
        ("once", "bare", True),
        ("as a shadow", "bare", False),
        ("one group, as a shadow", "accumulated", False),
    ],
)
def test_whoever_errs_once_is_named_and_put_right_and_nobody_is_to_be_evicted(
    three: dict[str, Any], name: str, bare: str, own: bool
) -> None:
    (event,) = named(three[name])
    assert (event["rank"], event["step"]) == (2, ranks.STRUCK_STEP)
    assert (event["detail"]["own"], event["detail"]["wrong_passes"]) == (own, 1)
    assert not named(three[name], "evict")
    assert states(three[name]) == states(three[bare])


@pytest.mark.representative
def test_between_audits_a_known_device_is_watched_until_it_is_replaced(
    three: dict[str, Any],
) -> None:
    assert [step for step in range(ranks.STEPS) if is_sampled(0.3, 0, step)] == [2, 4]
    assert [event["step"] for event in named(three["sampled"])] == [2, 3, 4]
    assert states(three["sampled"]) == states(three["bare"])
    assert [event["step"] for event in named(three["sampled on"])] == [2, 4]
    assert not set(states(three["sampled on"])) & set(states(three["bare"]))


@pytest.mark.representative
def test_a_doubt_that_a_repetition_confirms_is_settled_by_shadows(three: dict[str, Any]) -> None:
    lines = three["infinite"]
    assert {event["detail"]["verdict"] for event in named(lines, "rerun")} == {"genuine"}
    assert {event["rank"] for event in named(lines)} == {1}
    assert not named(lines, "nonfinite_genuine")
    assert states(lines) == states(three["bare"])


def test_of_two_ranks_repetition_decides_or_nobody(tmp_path: Path) -> None:
    once = {"ranks": [1], "only": 0}
    said = said_in(
        tmp_path,
        2,
        [
            scenario("bare"),
            scenario("clean", shadow=ALWAYS),
            scenario("persistent", shadow=ALWAYS, fault=PERSISTENT),
            scenario("once", shadow=ALWAYS, fault=once),
            scenario("as a shadow", shadow=ALWAYS, fault=once | {"only": 1}),
        ],
    )
    assert states(said["clean"]) == states(said["bare"])
    assert not named(said["clean"])
    assert all("no majority says who errs" in line["error"] for line in said["persistent"])
    assert not named(said["persistent"])
    (undecided,) = named(said["persistent"], "shadow_undecided")
    assert undecided["detail"]["units"] == [[0], [1]]
    for name, own in (("once", True), ("as a shadow", False)):
        (event,) = named(said[name])
        assert (event["rank"], event["detail"]["own"]) == (1, own)
        assert states(said[name]) == states(said["bare"])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks: FSDP2, HSDP of two by two, and two replicas of two tensor-parallel ranks."""
    scenarios = [
        case
        for layout in ("fsdp", "hsdp", "tp")
        for case in (
            scenario(layout, layout),
            scenario(f"{layout}, clean", layout, shadow=ALWAYS),
            scenario(f"{layout}, unshadowed", layout, fault=PERSISTENT),
            scenario(f"{layout}, persistent", layout, shadow=ALWAYS, fault=PERSISTENT),
            scenario(f"{layout}, once", layout, shadow=ALWAYS, fault=ONCE),
        )
    ]
    scenarios += [
        scenario("clipped", "fsdp", clip=0.05),
        scenario("clipped, persistent", "fsdp", shadow=ALWAYS, clip=0.05, fault=PERSISTENT),
    ]
    return said_in(tmp_path_factory.mktemp("four"), 4, scenarios)


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp"])
def test_a_divided_model_is_shadowed_too(four: dict[str, Any], layout: str) -> None:
    assert not named(four[f"{layout}, clean"])
    assert states(four[f"{layout}, clean"]) == states(four[layout])
    assert states(four[f"{layout}, unshadowed"]) != states(four[layout])
    once = named(four[f"{layout}, once"])
    assert {event["rank"] for event in once} == ({2, 3} if layout == "tp" else {2})
    assert states(four[f"{layout}, once"]) == states(four[layout])
    lines = four[f"{layout}, persistent"]
    if layout == "tp":  # two replicas cannot decide
        assert all("no majority" in line["error"] for line in lines)
        (undecided,) = named(lines, "shadow_undecided")
        assert undecided["detail"]["units"] == [[0, 1], [2, 3]]
    else:
        assert {event["rank"] for event in named(lines)} == {1}
        assert states(lines) == states(four[layout])


def test_a_divided_models_gradients_are_clipped_by_their_whole_norm(four: dict[str, Any]) -> None:
    assert states(four["clipped"]) != states(four["fsdp"])
    assert {event["rank"] for event in named(four["clipped, persistent"])} == {1}
    assert states(four["clipped, persistent"]) == states(four["clipped"])


def test_of_three_tensor_parallel_replicas_the_wrong_one_is_named_as_a_unit(
    tmp_path: Path,
) -> None:
    scenarios = [
        scenario("tp", "tp"),
        scenario("persistent", "tp", shadow=ALWAYS, fault={"ranks": [3]}),
    ]
    said = said_in(tmp_path, 6, scenarios)
    found = named(said["persistent"])
    assert {event["rank"] for event in found} == {2, 3}
    assert all(event["detail"]["unit"] == [2, 3] for event in found)
    assert {event["rank"] for event in named(said["persistent"], "evict")} == {2, 3}
    assert states(said["persistent"]) == states(said["tp"])
