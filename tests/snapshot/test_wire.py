"""The wire version changes with the schema of any message, and every message can be read."""

import hashlib
import json
from typing import Any

import msgspec
import pytest

from bench.fuzz_frames import LOCAL, PEER, RANK
from holdfast.snapshot.node import queries
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.cluster_steps import Held
from holdfast.snapshot.protocol.parity_stream import ParityPlan
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.transport import frames, handshake, requests

SENDERS = (
    m.FromRank,
    m.FromReader,
    m.FromPeer,
    queries.Query,
    requests.FromReadingRank,
    handshake.Handshake,
)
# After a change that an SMP of a released version would not understand: raise WIRE_VERSION in
# messages.py and the digit in frames.py. In any case write here what the failing test prints.
KNOWN = (2, "ac98acbf7f89dbac")


def schema() -> str:
    """Return a digest of the schemas of everything that is sent."""
    kinds = [kind for sender in SENDERS for _, kind in sorted(sender.by_verb.items())]
    _, found = msgspec.json.schema_components(
        [*kinds, Roster, ParityPlan, Held], schema_hook=lambda kind: {"title": kind.__name__}
    )
    for kind in found.values():
        kind.pop("description", None)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def test_a_changed_schema_has_another_wire_version() -> None:
    assert (m.WIRE_VERSION, schema()) == KNOWN
    assert f"HFS{m.WIRE_VERSION}".encode() == frames._MAGIC


def test_the_schema_shows_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = schema()

    class Begin(m.FromRank):
        step: int

    monkeypatch.setitem(m.FromRank.by_verb, "begin", Begin)
    assert schema() != before


def test_a_sample_of_every_message_is_read_and_with_one_field_more_or_less_refused() -> None:
    senders = (m.FromRank, m.FromReader, m.FromPeer, queries.Query, requests.FromReadingRank)
    samples = {sample["verb"]: sample for sample in (*LOCAL, *PEER, *RANK)}
    for sender in senders:
        for verb, kind in sender.by_verb.items():
            if verb in ("stop", "finished", "persist"):  # the fuzzer sends none
                continue
            blobbed = {"manifest", "blob"} & set(kind.__struct_fields__)
            read(sender, samples[verb], b"x" if blobbed else b"")
            assert not refuses(sender, samples[verb], b"x" if blobbed else b"")
            assert refuses(sender, samples[verb] | {"more": 1})
            assert bool(blobbed) != refuses(sender, samples[verb], b"x")
            required = [
                field.name
                for field in msgspec.structs.fields(kind)
                if field.required and field.name in samples[verb] and field.name != "rank"
            ]
            for name in required:
                fewer = {key: value for key, value in samples[verb].items() if key != name}
                assert refuses(sender, fewer, b"x" if blobbed else b""), (verb, name)


def read(sender: Any, header: dict[str, Any], blob: bytes = b"") -> Any:
    numbered = sender in (m.FromRank, m.FromReader, m.FromPeer)
    return m.parse(sender, header, blob, 0 if numbered else None)


def refuses(sender: Any, header: dict[str, Any], blob: bytes = b"") -> bool:
    try:
        read(sender, header, blob)
    except m.ProtocolViolation:
        return True
    return False
