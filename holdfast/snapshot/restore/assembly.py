"""A state rebuilt from what the memories of a sharding group still hold.

Shards that exist are fetched into place. Lost or damaged buckets are decoded from the fragments of
their stripe that are left. Every bucket must match the digest that was computed from the tensors.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.errors import SnapshotMismatch
from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.restore.stripe_decode import (
    Columns,
    ExpectedDigests,
    Fetcher,
    Report,
    Source,
)


@dataclass(frozen=True)
class Assembled:
    """Bytes of a state (uint8, in memory of their own), and the report on their origin."""

    state: torch.Tensor
    report: Report


@dataclass(frozen=True)
class Part:
    """The remains of one part of a state: verified manifests by node, and the nodes' memories.

    For lost nodes there are mirrors of manifests. A damaged or missing one is left out.
    """

    shares: Mapping[int, ShareManifest]
    source: Source


def assemble(
    shares: Mapping[int, ShareManifest],
    alive: Collection[int],
    source: Source,
    *,
    wanted: Collection[int] | None = None,
    into: torch.Tensor | None = None,
) -> Assembled:
    """Rebuild one part of a state, ``Part(shares, source)``.

    The memories of the nodes ``alive`` can be read. The shards of the nodes ``wanted`` are rebuilt,
    in their order; by default all, which for replicas is the slice of the state. They go to
    ``into`` (uint8 on CPU), by default new memory.

    **Guarantees**: every byte matches the digest of the tensors, or an exception is raised. Besides
    ``into`` the memory is at most four columns of a stripe, of 4 MiB a fragment.

    Raises:
        SnapshotLost: more is lost than the parities make up for; names node, stripe, bucket, paths.
        SnapshotCorrupt: the same for damage.
        SnapshotMismatch: the manifests are not of one part of one state.
    """
    digests = ExpectedDigests(shares)
    striping = digests.striping
    nodes = sorted(range(striping.nodes) if wanted is None else set(wanted))
    if not nodes or not set(nodes) <= set(range(striping.nodes)):
        raise ValueError(f"wanted={nodes}: must be some of the nodes 0 … {striping.nodes - 1}")
    nbytes = sum(striping.shard_nbytes[node] for node in nodes)
    state = torch.empty(nbytes, dtype=torch.uint8) if into is None else into
    if state.numel() != nbytes:
        raise ValueError(f"{state.numel()} bytes of memory for the {nbytes} of nodes {nodes}")
    lost = set(range(striping.nodes)) - set(alive)
    if any(striping.shard_nbytes[node] for node in lost & set(nodes)):
        striping.check_loss(lost)
    fetcher = Fetcher(digests, alive, source)
    Columns(fetcher, nodes, state.numpy()).fill()
    return Assembled(state, fetcher.report)


def assemble_parts(
    parts: Sequence[Part],
    alive: Sequence[Collection[int]],
    *,
    node: int | None = None,
    into: torch.Tensor | None = None,
) -> Assembled:
    """Rebuild the stable tensors of a state from the remains of all its parts, each given once.

    ``alive`` has the nodes whose memories can be read, for each part; one that fails is not asked
    again. If the nodes hold different states, ``node`` is the one whose state is rebuilt.
    """
    shares = [ExpectedDigests(part.shares).share for part in parts]
    found, sizes = sorted(share.part for share in shares), {share.sizes for share in shares}
    needed = shares[0].parts if shares else 1
    if found != list(range(needed)) or len(sizes) > 1:
        raise SnapshotMismatch(
            f"parts {found} of states of {sorted(sizes)} bytes: each of {needed} parts of one "
            "state is needed once"
        )
    first = shares[0]
    if node is None and not first.replicated:
        raise ValueError("the nodes hold different states: say which node's is wanted")
    whose = first.node if node is None else node
    state = torch.empty(first.sizes[whose], dtype=torch.uint8) if into is None else into
    report = Report()
    wanted, failed = None if first.replicated else [whose], set[int]()
    for part, share, nodes in zip(parts, shares, alive, strict=True):
        span, left = share.slice_of(whose), set(nodes) - failed
        into = state[span.start : span.stop]
        done = assemble(part.shares, left, part.source, wanted=wanted, into=into)
        failed |= left & set(done.report.lost)
        report.add(done.report)
    return Assembled(state, report)


def tensors(described: ShareManifest, state: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a rank's state, for ``Training.tree``.

    ``described`` is the rank's own manifest, which has its private tensors, or a mirror of it, and
    ``state`` is memory that begins with its stable ones (``assemble_parts``).

    Raises:
        SnapshotMismatch: the manifest is of a larger state.
        SnapshotCorrupt: a private tensor does not match its digest; names its path.
    """
    nbytes = described.share.own_nbytes
    if state.numel() < nbytes:
        raise SnapshotMismatch(f"a state of {state.numel()} bytes, its manifest says {nbytes}")
    private = torch.empty(len(described.private), dtype=torch.uint8)
    private.numpy()[:] = memoryview(described.private)
    start, found = described.private_start, []
    for entry in described.manifest.entries:
        if entry.digest:
            found += flat_buffer.read([entry], private, start)
            continue
        raw = state[entry.offset : entry.offset + entry.nbytes]
        # Loading copies a model's tensors, but an optimizer keeps those that it is given; a view
        # would keep all of the state's memory.
        kept = raw if entry.path.startswith("model.") else raw.clone()
        found.append(flat_buffer.as_tensor(entry, kept))
    return found
