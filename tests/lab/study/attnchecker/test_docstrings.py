"""The docstring task: true and false pairs, the same each time, nothing of the test in training."""

from itertools import islice
from pathlib import Path

import torch

from holdfast_lab.study.attnchecker.configurations import PAD
from holdfast_lab.study.attnchecker.docstrings import (
    CLS,
    SEP,
    UNKNOWN,
    Task,
    docstring_task,
    documented_functions,
)

LENGTH = 24


def sources(folder: Path, count: int = 40) -> Path:
    """A folder of Python whose n-th function is about word n alone."""
    for number in range(count):
        word = chr(98 + number // 26) + chr(97 + number % 26)
        documented = f'def {word}(x):\n    """Returns {word}{word} of everything."""\n'
        (folder / f"m{number}.py").write_text(f"{documented}    return {word}{word}\n")
    return folder


def make(folder: Path, **changes: object) -> Task:
    """A small task from such a folder."""
    options: dict[str, object] = {"length": LENGTH, "vocabulary": 500, "folder": folder}
    return docstring_task(40, **(options | changes))  # type: ignore[arg-type]


def words(task: Task, row: torch.Tensor) -> tuple[set[str], set[str]]:
    """The words of a sequence's docstring and source."""
    texts: list[set[str]] = [set()]
    for token in row.tolist():
        if token == SEP:
            texts.append(set())
        elif token not in (CLS, PAD):
            texts[-1].add(task.vocabulary[token])
    first, second, rest = texts
    assert not rest
    return first, second


def test_a_functions_source_comes_without_its_docstring(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "class C:\n    async def first(self):\n"
        '        """Says something\n        of interest here."""\n'
        "        return 1\n\n\ndef bare():\n    return 2\n\n\n"
        'def short():\n    """Too short."""\n    return 3\n'
    )
    (function,) = documented_functions(path)
    assert function.docstring == "Says something\nof interest here."
    assert function.source.split() == ["async", "def", "first(self):", "return", "1"]
    path.write_text("def broken(:\n")
    assert documented_functions(path) == []
    path.write_bytes(b"\xff\xfe")
    assert documented_functions(path) == []


def test_true_pairs_belong_together_and_false_ones_do_not(tmp_path: Path) -> None:
    task = make(sources(tmp_path), test_share=0.5)
    seen: list[set[str]] = []
    for row, label in zip(task.train.tokens, task.train.labels, strict=True):
        docstring, source = words(task, row)
        about = {word for word in docstring if len(word) == 4 and word[:2] == word[2:]}
        assert len(about) == 1
        assert (about <= source) == bool(label)
        seen.append(about)
    assert task.train.labels.sum() == len(task.train) / 2


def test_a_sequence_has_both_texts_and_its_padding_is_masked(tmp_path: Path) -> None:
    task = make(sources(tmp_path))
    for part in (task.train, task.test):
        assert part.tokens.shape == (len(part), LENGTH)
        assert (part.tokens[:, 0] == CLS).all()
        assert ((part.tokens == SEP).sum(1) == 2).all()
        assert torch.equal(part.mask == 0, part.tokens == PAD)
        assert part.tokens.max() < len(task.vocabulary)


def test_no_function_is_in_both_parts_and_the_vocabulary_is_the_trainings(tmp_path: Path) -> None:
    task = make(sources(tmp_path))
    assert (len(task.train), len(task.test)) == (32, 8)
    known = {word for word in task.vocabulary if len(word) == 4 and word[:2] == word[2:]}
    assert len(known) == len(task.train)
    assert (task.test.tokens == UNKNOWN).any(1).all()
    few = make(sources(tmp_path), vocabulary=6)
    assert few.vocabulary == ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "(", ")")


def test_batches_take_every_example_once_an_epoch(tmp_path: Path) -> None:
    train = make(sources(tmp_path)).train
    batches = list(islice(train.batches(8, seed=3), 8))
    assert [batch["labels"].shape for batch in batches] == [(8,)] * 8
    for epoch in (batches[:4], batches[4:]):
        rows = torch.cat([batch["input_ids"] for batch in epoch])
        assert sorted(rows.tolist()) == sorted(train.tokens.tolist())
    assert not torch.equal(batches[0]["input_ids"], batches[4]["input_ids"])
    again = next(train.batches(8, seed=3))
    assert torch.equal(again["input_ids"], batches[0]["input_ids"])
