"""Tensors that nothing writes, such as frozen weights: a change of one lasts and is found later."""

from collections import Counter
from collections.abc import Set

import torch

from holdfast.snapshot.client.copies import Copy

_Place = tuple[int, int]  # address and version counter


class Constants:
    """Frozen weights and buffers whose digests are compared from one step to the next.

    A tensor is taken for constant if two digests in succession were equal and none differed before.
    Tensors that are trained
    never are: some optimizers write them without PyTorch's version counter.

    Attributes:
        owed: The right digests of tensors that changed, until a roll-back has put them right.
        times: How often each tensor has changed, by path.
    """

    def __init__(self) -> None:
        self.owed: dict[str, str] = {}
        self.times: Counter[str] = Counter()
        self._latest: dict[str, tuple[_Place, str]] = {}
        self._constant: set[str] = set()
        self._written: set[str] = set()  # what the program has written once, it may write again

    def __contains__(self, path: str) -> bool:
        return path in self._constant

    def take(self, copy: Copy, edited: Set[str]) -> tuple[list[int], list[int]]:
        """Compare the digests after a step with those of earlier steps; leave ``edited`` ones out.

        Returns:
            The indices of constant tensors that changed, although the program did not write them;
            and of those that were found earlier and that a roll-back did not put right.
        """
        flat, changed, left = copy.flat, list[int](), list[int]()
        for index, digest in copy.digests.items():
            if flat.stable[index] and index not in flat.frozen:
                continue
            path = flat.paths[index]
            if path in edited:
                continue
            if self.owed.get(path) == digest:
                del self.owed[path]
            elif path in self.owed:
                left.append(index)
                continue
            place = _place(copy, flat.live[index], index)
            before, known = self._latest.get(path, (None, ""))
            if path in self._constant and digest != known and before == place and place[1] >= 0:
                changed.append(index)
                self.times[path] += 1
                self.forget(path)
                self.owed[path] = known
                continue
            if known and digest != known:
                self._written.add(path)
            constant = digest == known and path not in self._written
            (self._constant.add if constant else self._constant.discard)(path)
            self._latest[path] = place, digest
        return changed, left

    def forget(self, path: str) -> None:
        """Begin anew with a tensor, whatever it holds."""
        self.owed.pop(path, None)
        self._latest.pop(path, None)
        self._constant.discard(path)


def _place(copy: Copy, live: torch.Tensor, index: int) -> _Place:
    return live.data_ptr(), copy.versions[index]
