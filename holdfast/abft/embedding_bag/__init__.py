"""EmbeddingBag whose rows carry checksums: every bag is checked, and rotten rows are repaired."""

from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.op import embedding_bag, embedding_bags
from holdfast.abft.embedding_bag.scrub import Scrubber, ScrubReport, scrub
from holdfast.abft.embedding_bag.table import KINDS, Table

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
