"""Parts of the reference trainer: a byte-level GPT, and a loader that resumes bit for bit."""

from holdfast_lab.trainer.data import ByteLoader, Corpus, read_corpus
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer, make_schedule

__all__ = [
    "GPT",
    "ByteLoader",
    "Corpus",
    "GPTConfig",
    "loss",
    "make_optimizer",
    "make_schedule",
    "read_corpus",
]
