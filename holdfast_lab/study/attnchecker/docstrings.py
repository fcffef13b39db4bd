"""A sequence-pair task without downloads: does this docstring belong to this function's source?

It replaces the paper's MRPC (are two sentences paraphrases?), which also has two texts, two classes
and a few thousand examples. It is made from the standard library of the running Python.
"""

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.errors import ConfigError
from holdfast_lab.study.attnchecker.configurations import PAD

CLS, SEP, UNKNOWN = 1, 2, 3
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
SHORTEST_LENGTH = 8
SHORTEST_DOCSTRING = 24  # characters
LEFT_OUT = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+|[^\sA-Za-z0-9_]")


@dataclass(frozen=True)
class Function:
    """A documented function: its docstring, and its source without the docstring."""

    docstring: str
    source: str


@dataclass(frozen=True)
class Examples:
    """Tokenized pairs of a docstring and a function's source, with their labels.

    Attributes:
        tokens: int64 [N, length], padded on the right.
        mask: int64 [N, length], 1 for a token and 0 for padding.
        labels: int64 [N], 1 if the docstring belongs to the function.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, which: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the examples with these numbers as input of a model."""
        return {
            "input_ids": self.tokens[which],
            "attention_mask": self.mask[which],
            "labels": self.labels[which],
        }

    def batches(self, size: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches without end, reshuffled each epoch; the seed determines every batch.

        Raises:
            ConfigError: A batch would have more examples than there are.
        """
        if not 1 <= size <= len(self):
            raise ConfigError(f"batches of {size} from {len(self)} examples: take more pairs")
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self), generator=generator)
            yield from (self.batch(which) for which in order.split(size) if len(which) == size)


@dataclass(frozen=True)
class Task:
    """The examples for training and for testing, which have no function in common."""

    train: Examples
    test: Examples
    vocabulary: tuple[str, ...]


def docstring_task(
    pairs: int,
    *,
    length: int = 128,
    vocabulary: int = 4096,
    test_share: float = 0.2,
    seed: int = 0,
    folder: Path | None = None,
) -> Task:
    """Make the task; half of the pairs are true, the others have another function's docstring.

    Args:
        pairs: Number of functions, each of which gives one pair.
        length: Number of tokens of a sequence, ``[CLS] docstring [SEP] source [SEP]``; longer texts
            are cut.
        vocabulary: Number of known tokens: four special ones and the most frequent of the training
            set.
        test_share: Share of the functions that are kept for testing.
        seed: Seed of the choice of functions, the split and the false pairs.
        folder: Folder of Python sources; by default the running Python's standard library.

    Guarantees: the same arguments and sources give the same task.

    Raises:
        ConfigError: A number is out of range, or there are too few documented functions.
    """
    _check(pairs, length, vocabulary, test_share)
    generator = torch.Generator().manual_seed(seed)
    chosen = _chosen(folder or Path(sysconfig.get_path("stdlib")), pairs, generator)
    held_out = max(2, round(pairs * test_share))
    parts = {"test": chosen[:held_out], "train": chosen[held_out:]}
    words = _commonest(parts["train"], vocabulary - len(SPECIAL))
    known = {word: number for number, word in enumerate((*SPECIAL, *words))}
    encoded = {name: _encode(part, known, length, generator) for name, part in parts.items()}
    return Task(encoded["train"], encoded["test"], tuple(known))


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words, numbers and signs; identifiers are split into words."""
    return [word.lower() for word in _WORD.findall(text)]


def documented_functions(path: Path) -> list[Function]:
    """List the functions of a file with a long enough docstring; none if it is not valid Python."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return []
    lines = text.splitlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    found = (_function(node, lines) for node in sorted(nodes, key=lambda node: node.lineno))
    return [function for function in found if function is not None]


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]
) -> Function | None:
    docstring = ast.get_docstring(node) or ""
    if len(docstring) < SHORTEST_DOCSTRING or len(node.body) < 2:
        return None
    written = node.body[0]
    assert written.end_lineno is not None
    assert node.end_lineno is not None
    kept = lines[node.lineno - 1 : written.lineno - 1], lines[written.end_lineno : node.end_lineno]
    return Function(docstring, "\n".join((*kept[0], *kept[1])))


def _check(pairs: int, length: int, vocabulary: int, test_share: float) -> None:
    if length < SHORTEST_LENGTH:
        raise ConfigError(f"length = {length} must be at least {SHORTEST_LENGTH} tokens")
    if vocabulary <= len(SPECIAL):
        raise ConfigError(f"vocabulary = {vocabulary} must exceed {len(SPECIAL)}, the special ones")
    if not 0 < test_share < 1 or pairs - max(2, round(pairs * test_share)) < 2:
        raise ConfigError(
            f"pairs = {pairs} and test_share = {test_share} must leave at least two for each part"
        )


def _chosen(folder: Path, count: int, generator: torch.Generator) -> list[Function]:
    """Collect ``count`` functions with different docstrings from files in random order."""
    paths = [
        path
        for path in folder.rglob("*.py")
        if not LEFT_OUT & set(path.relative_to(folder).parts) and path.is_file()
    ]
    paths.sort(key=lambda path: path.relative_to(folder).parts)
    found: dict[str, Function] = {}
    for place in torch.randperm(len(paths), generator=generator).tolist():
        for function in documented_functions(paths[place]):
            found.setdefault(function.docstring, function)
        if len(found) >= count:
            functions = list(found.values())
            order = torch.randperm(len(functions), generator=generator)[:count]
            return [functions[number] for number in order.tolist()]
    raise ConfigError(f"{folder} has {len(found)} documented functions, not {count}: take fewer")


def _commonest(functions: Sequence[Function], count: int) -> list[str]:
    counts: Counter[str] = Counter()
    for function in functions:
        counts.update(tokenize(function.docstring))
        counts.update(tokenize(function.source))
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def _encode(
    functions: Sequence[Function],
    known: Mapping[str, int],
    length: int,
    generator: torch.Generator,
) -> Examples:
    # Each false docstring is that of the next function in a random cycle, never its own.
    cycle = torch.randperm(len(functions), generator=generator).tolist()
    other = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    labels = torch.arange(len(functions)) % 2
    rows = [
        _sequence(functions[number if label else other[number]].docstring, function.source, known)
        for number, (function, label) in enumerate(zip(functions, labels.tolist(), strict=True))
    ]
    tokens = torch.full((len(rows), length), PAD)
    for row, (docstring, source) in zip(tokens, rows, strict=True):
        half = docstring[: (length - 3) // 2]
        text = [CLS, *half, SEP, *source[: length - 3 - len(half)], SEP]
        row[: len(text)] = torch.tensor(text)
    return Examples(tokens, (tokens != PAD).long(), labels)


def _sequence(docstring: str, source: str, known: Mapping[str, int]) -> tuple[list[int], list[int]]:
    first, second = (
        [known.get(word, UNKNOWN) for word in tokenize(text)] for text in (docstring, source)
    )
    return first, second
