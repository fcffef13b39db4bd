"""Fault schedules: what is read, what is refused and in which words, and the round trip."""

import math

import pytest
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.inject.schedule import (
    KINDS,
    NO_RANK,
    OUTSIDE_MODELS,
    SITES,
    TILE_SITES,
    Fault,
    check_schedule,
    dump_schedule,
    load_schedule,
    parse_schedule,
)
from holdfast.sites import BACKWARD_TILES, FORWARD_TILES, TILE_STAGES

GOOD = """
[[fault]]
step = 3
rank = 1
kind = "bitflip"
site = "operand"
op = "blocks.0.attn/bmm#2/grad_a"
bit = 30
index = [4, 7]

[[fault]]
step = 5
rank = 0
kind = "value"
op = "head/mm/forward"
value = 12

[[fault]]
step = 9
rank = 0
kind = "kill_trainer"

[[fault]]
step = 11
kind = "lose_node"
host = 2
"""
OPS = ["blocks.0.attn.qkv/addmm/forward", "blocks.0.attn/bmm/forward", "blocks.0.attn/bmm#2/grad_a"]
MODULES = ["blocks.0.ln_1", "blocks.0.attn", "ln_f"]


def _message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_schedule(text, "storm.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("storm.toml: ")
    return message


def _table(**values: object) -> str:
    fields = {"step": 1, "rank": 0, "kind": '"inf"', "op": '"head/mm/forward"'} | values
    lines = [f"{key} = {value}" for key, value in fields.items() if value is not None]
    return "\n".join(["[[fault]]", *lines])


def _lost(**values: object) -> str:
    fields = {"kind": '"lose_node"', "rank": None, "op": None, "host": 0}
    return _table(**fields | values)


def test_reads_a_schedule(tmp_path):
    path = tmp_path / "storm.toml"
    path.write_text(GOOD)
    assert load_schedule(path) == [
        Fault(3, 1, "bitflip", "operand", "blocks.0.attn/bmm#2/grad_a", 30, (4, 7), None, 0),
        Fault(5, 0, "value", "output", "head/mm/forward", None, None, 12.0, 1),
        Fault(9, 0, "kill_trainer", identifier=2),
        Fault(11, NO_RANK, "lose_node", identifier=3, host=2),
    ]


@for_each(
    ("table", "words"),
    [
        (_table(kind='"bitflop"'), ["'bitflop'", *KINDS]),
        (_table(site='"outputs"'), ["'outputs'", *SITES]),
        (_table(bits=3), ["unknown key 'bits'", "step", "index", "value"]),
        (_table(step=None), ["step is missing"]),
        (_table(rank=None), ["rank is missing"]),
        (_table(kind=None), ["kind is missing"]),
        (_table(op=None), ["op is missing", "matmul"]),
        (_table(op='""'), ["op is missing", "matmul"]),
        (_table(op=None, site='"module"'), ["op is missing", "module"]),
        (_table(op=None, site='"rest"'), ["op is missing", "tensor of the state"]),
        (_table(kind='"kill_trainer"', site='"rest"'), ["site 'rest' is meaningless"]),
        (_table(step=-4), ["step = -4", "negative"]),
        (_table(rank=-1), ["rank = -1", "negative"]),
        (_table(kind='"bitflip"'), ["needs bit", "0 to 63"]),
        (_table(kind='"bitflip"', bit=64), ["bit = 64", "0 to 63"]),
        (_table(kind='"bitflip"', bit=-1), ["bit = -1", "0 to 63"]),
        (_table(bit=3), ["bit = 3", "only for kind 'bitflip'", "'inf'"]),
        (_table(kind='"value"'), ["needs value"]),
        (_table(kind='"value"', value="nan"), ["nan", "kind = 'nan'"]),
        (_table(value=1.0), ["value = 1.0", "only for kind 'value'", "'inf'"]),
        (_table(kind='"value"', value='"big"'), ["value = 'big'", "number"]),
        (_table(kind='"value"', value="9" * 400), ["beyond the range"]),
        (_table(kind='"bitflip"', bit=3.0), ["bit = 3.0", "integer"]),
        (_table(step="true"), ["step = True", "integer"]),
        (_table(step='"1"'), ["step = '1'", "integer"]),
        (_table(op=7), ["op = 7", "string"]),
        (_table(index=3), ["index = 3", "list of integers"]),
        (_table(index="[1, 2.5]"), ["index = [1, 2.5]", "list of integers"]),
        (_table(index="[1, true]"), ["index", "list of integers"]),
        (_table(index="[0, -2]"), ["[0, -2]", "negative"]),
        (_table(kind='"kill_trainer"', index="[0]"), ["index", "kill_trainer"]),
        (_table(host=1), ["host = 1", "only for kind 'lose_node'"]),
        (_lost(host=None), ["'lose_node' needs host"]),
        (_lost(host=-1), ["host = -1", "negative"]),
        (_lost(host="true"), ["host = True", "integer"]),
        (_lost(rank=1), ["rank = 1", "meaningless", "lose_node"]),
        (_lost(op='"head/mm/forward"'), ["op = 'head/mm/forward'", "meaningless", "lose_node"]),
        (_lost(site='"operand"'), ["site = 'operand'", "meaningless", "lose_node"]),
        (_lost(index="[0]"), ["index = (0,)", "meaningless", "lose_node"]),
        (_lost(bit=3), ["bit = 3", "only for kind 'bitflip'"]),
        (_lost(step=None), ["step is missing"]),
        (_table(site='"scores"'), ["'scores'", "forward and backward", "head/mm/forward", "sdpa"]),
        (_table(site='"grad_softmax"', op='"attn/sdpa/forward"'), ["backward pass", "is not"]),
        (_table(site='"state"', op='"attn/sdpa_backward/grad_qkv"'), ["forward pass", "is not"]),
        (_table(op='"attn/sdpa#2/forward"'), ["no site 'output'", *FORWARD_TILES]),
        (_table(op='"a/sdpa_backward/grad_qkv"', site='"operand"'), ["valid", *BACKWARD_TILES]),
        (_table(kind='"kill_trainer"', op='"attn/sdpa/forward"'), ["no site 'output'"]),
    ],
)
def test_refusals_name_the_fault_the_value_and_the_valid_ones(table, words):
    message = _message(_table() + "\n" + table)
    assert message.startswith("storm.toml: fault 2: ")
    for word in words:
        assert word in message


@for_each("site", TILE_STAGES)
def test_fused_attention_is_struck_at_its_tiles(site):
    ops = {"a/sdpa#2/forward": FORWARD_TILES, "a/sdpa_backward/grad_qkv": BACKWARD_TILES}
    assert set(TILE_STAGES) == set(TILE_SITES) == {*FORWARD_TILES, *BACKWARD_TILES}
    for op, stages in ops.items():
        if site not in stages:
            continue
        fault = Fault(step=0, rank=0, kind="inf", site=site, op=op)
        assert parse_schedule(dump_schedule([fault]), "storm.toml") == [fault]
        check_schedule([fault], ops=list(ops), modules=[], steps=1, ranks=1)
        with pytest.raises(ConfigError, match="is not a fused attention of this model"):
            check_schedule([fault], ops=OPS, modules=[], steps=1, ranks=1)


def test_refusals_of_the_document():
    assert parse_schedule("# calm weather\n", "storm.toml") == []
    assert "unknown key 'faults'" in _message("[[faults]]\nstep = 1")
    assert "write [[fault]]" in _message("[fault]\nstep = 1")
    assert "write [[fault]]" in _message("fault = [1, 2]")
    assert "line 1" in _message("step 12")
    assert len(_message(_table(kind='"' + "x" * 5000 + '"'))) < 400


def test_a_second_kill_of_the_same_rank_and_step_is_refused():
    kill = _table(kind='"kill_trainer"', op=None)
    assert "fault 3: kills rank 0 at step 1 again, as fault 1" in _message(
        "\n".join([kill, _table(), kill])
    )
    other = _table(kind='"kill_trainer"', op=None, rank=1)
    assert len(parse_schedule(f"{kill}\n{other}", "storm.toml")) == 2
    assert "fault 3: loses host 0 at step 1 again, as fault 2" in _message(
        "\n".join([kill, _lost(), _lost()])
    )
    assert len(parse_schedule("\n".join([kill, _lost(), _lost(host=1)]), "storm.toml")) == 3


def test_unreadable_files_are_refused(tmp_path):
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_schedule(missing)
    with pytest.raises(ConfigError, match="directory"):
        load_schedule(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml .*UTF-8"):
        load_schedule(binary)
    with pytest.raises(ValueError, match="needs bit"):
        Fault(step=0, rank=0, kind="bitflip", op="head/mm/forward")


@st.composite
def _faults(draw: st.DrawFn, identifier: int) -> Fault:
    kind = draw(st.sampled_from(KINDS))
    if kind == "lose_node":
        host = draw(st.integers(0, 63))
        return Fault(identifier, NO_RANK, kind, identifier=identifier, host=host)
    words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    index = st.none() | st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
    no_sites = {*TILE_SITES, *(OUTSIDE_MODELS if kind == "kill_trainer" else ())}
    return Fault(
        # A kill a step: two of the same rank and step are refused.
        step=identifier + draw(st.integers(0, 1)) * 1000,
        rank=draw(st.integers(0, 10_000)),
        kind=kind,
        site=draw(st.sampled_from(sorted({*SITES} - no_sites))),
        op="" if kind == "kill_trainer" and draw(st.booleans()) else draw(words),
        bit=draw(st.integers(0, 63)) if kind == "bitflip" else None,
        index=None if kind == "kill_trainer" else draw(index),
        value=draw(st.floats(allow_nan=False)) if kind == "value" else None,
        identifier=identifier,
    )


@given(st.integers(0, 6).flatmap(lambda n: st.tuples(*(_faults(i) for i in range(n)))))
def test_round_trip(faults):
    read = parse_schedule(dump_schedule(faults), "dumped")
    assert read == list(faults)
    signs = [math.copysign(1, fault.value) for fault in faults if fault.value is not None]
    assert signs == [math.copysign(1, fault.value) for fault in read if fault.value is not None]


def _refused(fault: Fault, **changes: object) -> str:
    limits = {"ops": OPS, "modules": MODULES, "steps": 10, "ranks": 2} | changes
    with pytest.raises(ConfigError) as caught:
        check_schedule([fault], **limits)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("fault 1: ")
    return message


def test_a_fitting_schedule_passes_and_faults_outside_the_run_are_refused():
    faults = [
        Fault(9, 1, "nan", "operand", OPS[0]),
        Fault(0, 0, "inf", "module", "ln_f"),
        Fault(3, 0, "kill_trainer"),
        Fault(4, 0, "kill_trainer", op=OPS[1]),
    ]
    check_schedule(faults, ops=OPS, modules=MODULES, steps=10, ranks=2)
    assert "step 10 is not in this run; valid: 0 to 9" in _refused(Fault(10, 0, "kill_trainer"))
    assert "rank 2 is not in this run; valid: 0 to 1" in _refused(Fault(1, 2, "kill_trainer"))
    lost = Fault(1, NO_RANK, "lose_node", host=2)
    check_schedule([lost], ops=OPS, modules=MODULES, steps=10, ranks=3, nodes=3)
    assert "host 2 cannot be lost in this run; valid: 0 to 1" in _refused(lost, nodes=2)
    alone = Fault(1, NO_RANK, "lose_node", host=0)
    assert "host 0 cannot be lost in this run; valid: none, as it is" in _refused(alone)


def test_an_unknown_name_gets_the_closest_first_then_all():
    message = _refused(Fault(1, 0, "nan", op="blocks.0.attn/bmm#2/grad_b"))
    assert "'blocks.0.attn/bmm#2/grad_b' is not a matmul" in message
    listed = message.split("valid: ")[1].split(", ")
    assert listed[0] == "blocks.0.attn/bmm#2/grad_a"
    assert sorted(listed) == sorted(OPS)
    assert "is not a module" in _refused(Fault(1, 0, "nan", "module", OPS[0]))
    assert "is not a matmul" in _refused(Fault(1, 0, "nan", "checksum", "ln_f"))
    assert "is not a matmul" in _refused(Fault(1, 0, "kill_trainer", op="ln_f"))


def test_a_long_list_of_ops_is_cut_and_counted():
    ops = [f"blocks.{layer}.mlp.up/addmm/forward" for layer in range(500)]
    message = _refused(Fault(1, 0, "nan", op="blocks.499.mlp.up/addmm/foward"), ops=ops)
    assert "valid: blocks.499.mlp.up/addmm/forward, " in message
    shown = message.split("valid: ")[1].split(" and ")[0].count(",") + 1
    assert message.endswith(f"and {500 - shown} more")
    assert len(message) < 600
    assert _refused(Fault(1, 0, "nan", op="x"), ops=[]).endswith("valid: none")


def test_a_tensor_at_rest_is_one_of_the_state():
    fault = Fault(1, 0, "bitflip", "rest", "optimizer.state.0.exp_avg", 31)
    state = ["model.fc.weight", "optimizer.state.0.exp_avg"]
    run = {"ops": OPS, "modules": MODULES, "steps": 2, "ranks": 1}
    check_schedule([fault], state=state, **run)
    assert parse_schedule(dump_schedule([fault]), "storm.toml") == [fault]
    with pytest.raises(ConfigError, match=r"'optimizer.state.0.exp_avg' is not a tensor of the st"):
        check_schedule([fault], state=state[:1], **run)
    with pytest.raises(ConfigError, match="valid: none"):
        check_schedule([fault], **run)
