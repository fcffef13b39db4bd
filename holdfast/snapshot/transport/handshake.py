"""The proofs that both sides of a connection between nodes give, and the keys that follow from it.

The side that was connected to sends a nonce. The other answers with who it is, a nonce of its own
and an HMAC-SHA256 of both under the run's secret; the first returns another HMAC of the same. Every
later frame has a MAC under a key for its direction, which depends on both nonces.
"""

import hashlib
import hmac
import secrets
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, structs

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Count, Port

Nonce = Annotated[str, Meta(max_length=64)]
Proof = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Handshake(m.Event, sender=True):
    """A message of a process that has not given its proof yet."""


class Challenge(Handshake, verb="challenge"):
    """The accepting side asks for a proof."""

    nonce: Nonce


class Claim(Handshake, verb="answer"):
    """The connecting side states who it is, and proves that it knows the secret.

    An SMP states the ``port`` on which it listens, and its ``instance``, which distinguishes it
    from an SMP whose place it took.
    """

    role: Literal["peer", "rank"]
    node: Count
    epoch: Count
    port: Port
    instance: Nonce
    nonce: Nonce
    proof: Proof


class Accepted(Handshake, verb="accepted"):
    """The accepting side proves that it knows the secret, too."""

    proof: Proof


class Pledge(NamedTuple):
    """The proofs of both sides, and the keys of the frames from each to the other."""

    connects: str
    accepted: str
    from_connecting: bytes
    from_accepting: bytes


def pledge(secret: str, challenge_nonce: str, claim: Claim) -> Pledge:
    """Return what follows from the secret and from what both sides have sent."""
    stated = claim.role, claim.node, claim.epoch, claim.port, claim.instance
    words = *stated, challenge_nonce, claim.nonce
    keys = (bytes.fromhex(_proof(secret, side, *words)) for side in ("sends", "returns"))
    return Pledge(_proof(secret, "connects", *words), _proof(secret, "accepted", *words), *keys)


def claim(
    secret: str,
    role: Literal["peer", "rank"],
    node: int,
    epoch: int,
    challenge_nonce: str,
    port: int = 0,
    instance: str = "",
    nonce: str = "",
) -> tuple[dict[str, object], Pledge]:
    """Return the header of the frame that answers a challenge, and what follows from it."""
    stated = Claim(role, node, epoch, port, instance, nonce or secrets.token_hex(16), "")
    given = pledge(secret, challenge_nonce, stated)
    return {"verb": "answer", **structs.asdict(stated), "proof": given.connects}, given


def _proof(secret: str, *words: object) -> str:
    text = "\n".join(map(str, words)).encode()
    return hmac.new(bytes.fromhex(secret), text, hashlib.sha256).hexdigest()
