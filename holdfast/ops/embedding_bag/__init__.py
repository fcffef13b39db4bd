"""EmbeddingBag whose rows carry checksums: every bag is checked, and rotten rows are repaired."""

from holdfast.ops.embedding_bag.batch import Batch
from holdfast.ops.embedding_bag.op import embedding_bag, embedding_bags
from holdfast.ops.embedding_bag.scrub import Scrubber, ScrubReport, scrub
from holdfast.ops.embedding_bag.table import KINDS, Table

__all__ = [
    "KINDS",
    "Batch",
    "ScrubReport",
    "Scrubber",
    "Table",
    "embedding_bag",
    "embedding_bags",
    "scrub",
]
