"""How a tensor is divided among ranks, in plain values that a manifest can hold."""

from dataclasses import dataclass

Placement = tuple[str | int, ...]


@dataclass(frozen=True)
class Sharding:
    """Which part of a whole tensor a rank's shard is.

    Attributes:
        shape, stride: of the whole tensor.
        placements: for each mesh dimension ``("Shard", dim)``, ``("Replicate",)`` or
            ``("_StridedShard", dim, split_factor)``.
        mesh_shape, mesh_names: of the mesh; names are empty if it has none.
        ranks: of the mesh, last dimension fastest.
        offsets: where the shard begins in the whole tensor; empty on a rank outside the mesh.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    ranks: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        """What identifies the mesh: equal on every rank of it, and after a restart."""
        return self.mesh_shape, self.mesh_names, self.ranks

    def __str__(self) -> str:
        names = self.mesh_names or tuple(str(number) for number in range(len(self.mesh_shape)))
        sizes = zip(names, self.mesh_shape, strict=True)
        mesh = ", ".join(f"{name}={size}" for name, size in sizes)
        placed = ", ".join(
            f"{name}({', '.join(map(str, args))})" for name, *args in self.placements
        )
        where = f"the part at {list(self.offsets)}" if self.offsets else "no part"
        return f"{where} of {list(self.shape)}, {placed} on mesh ({mesh}) of {_shown(self.ranks)}"


def _shown(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
