"""What a rank gives to a collective and gets from it, and whether that fits the other ranks'."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast import native
from holdfast.collectives.sums import MEAN, SUM, block_of, block_sums, wrong_blocks
from holdfast.digest.tensors import tensor_digest, tensor_digests

Tensors = Mapping[int, torch.Tensor]
ALL = -1  # in the place of a rank: every rank gets the same, or all give to it
_MOST_NAMED = 8


class Transfer:
    """A tensor of a collective: what is moved as it is, or summed over the ranks.

    What is given is listed by the rank that gets it, what is got by the rank that gives it, or for
    ``ALL``. ``operation`` is the number of the ``ReduceOp``; None if nothing is reduced.
    """

    def __init__(self, given: Tensors, got: Tensors, operation: int | None = None) -> None:
        self.given, self.got, self._operation = given, got, operation
        self._dtype = next((each.dtype for each in given.values()), torch.uint8)
        self._sums = operation in (SUM, MEAN) and self._dtype in native.ELEMENTS
        self.sums = torch.empty(2, 0, 0, dtype=torch.float64)  # of what is given, by rank and block
        self.digests = dict[int, str]()  # of what is sent, or of a reduction that all get
        self.shape = ""

    def note_given(self) -> None:
        """Note what this rank gives, before it is sent."""
        if self._sums:
            self.sums = torch.stack([block_sums(each)[0] for each in self.given.values()], dim=1)
            self.sums[1].sqrt_()
        elif self._operation is None:
            self.digests = dict(zip(self.given, tensor_digests(self.given.values()), strict=True))
        self.shape = f"{self._operation} {tuple(self.sums.shape)}"  # the same on all ranks

    def note_got(self) -> None:
        """Note what this rank has got, before anyone uses it."""
        if self._operation is None:
            self._got = dict(zip(self.got, tensor_digests(self.got.values()), strict=True))
        elif self._sums:
            (self._result, _), digest = block_sums(self.got[ALL], digested=ALL in self.given)
            self.digests = {ALL: digest} if digest else {}
        elif ALL in self.given:
            self.digests = {ALL: tensor_digest(self.got[ALL])}
        self.given = self.got = {}

    def verdict(
        self, place: int, digests: Sequence[Mapping[int, str]], total: torch.Tensor
    ) -> dict[str, Any]:
        """Say what is wrong with what the rank at this place has got; nothing if it is right.

        ``digests`` are those of each rank, ``total`` is the sum of ``sums`` over the ranks.
        """
        if self._operation is None:
            sent = {n: digests[n].get(ALL, digests[n].get(place)) for n in self._got}
            wrong = [n for n, own in self._got.items() if own != sent[n]]
            return {"sent_by": wrong} if wrong else {}
        ranks, blocks, everywhere = len(digests), list[int](), ALL in digests[place]
        if self._sums:
            own = total[:, 0 if everywhere else place]
            blocks = wrong_blocks(own, self._result, self._dtype, ranks, self._operation or SUM)
        places = [block_of(self._dtype) * block for block in blocks[:_MOST_NAMED]]
        where = {"elements_from": places} if blocks else {}
        copies = Counter(each.get(ALL, "") for each in digests)
        if len(copies) == 1:
            return {**where, "right_copies": 0} if where and everywhere else where
        common, count = copies.most_common(1)[0]
        if 2 * count > ranks:
            return {**where, "right_copies": count} if digests[place][ALL] != common else {}
        # Without a majority the sums may say which copy is right.
        return where or {"right_copies": -1}
