"""Five multiple-choice tasks without downloads, each of the kind of one of the paper's data sets.

============  ======================================================  ===================
data set      here                                                    choices
============  ======================================================  ===================
MathQA        word problems of one addition or subtraction            five numbers
ScienceQA     facts without a passage: what kind of name is this?     four kinds of names
OpenbookQA    a book of two such facts, and a question about a third  four kinds of names
BoolQ         a passage, and a question about what is in it           yes, no
RACE          a passage twice as long: what is in it?                 four topics
============  ======================================================  ===================

Passages, and the names in questions, are from the text that the model is pre-trained on: those of
the test are from another part of it. CosmosQA's stand-in is ``cloze``.
"""

import builtins
import keyword
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

import torch

from holdfast_lab.study.sdc.cloze import Questions, part_of
from holdfast_lab.study.sdc.subjects import text

Item = tuple[str, str, Sequence[str]]  # what is asked, the right choice, and the wrong ones
Make = Callable[[Random, str, int], Item]  # from the part of the text and the bytes for the prompt

PEOPLE = ("Ann", "Bob", "Eve", "Tom")
MARKS = {"a digit": r"\d", "a comment": "#", "a string": "['\"]", "a call": r"\w\("}
TOPICS = {"a class": "class ", "an import": "import ", "an error": "raise ", "a loop": "for "}


def _math(draw: Random, part: str, room: int) -> Item:
    one, other = draw.randrange(10, 50), draw.randrange(1, 10)
    more = draw.random() < 0.5
    right = one + other if more else one - other
    wrong = draw.sample([n for n in range(1, 60) if n != right], 4)
    verb = "gets" if more else "loses"
    asked = f"{draw.choice(PEOPLE)} has {one} and {verb} {other}. Left are "
    return asked, str(right), [str(n) for n in wrong]


@cache
def _kinds(part: str) -> dict[str, list[str]]:
    """Return names by kind; every fourth one is asked in the test only."""
    known = vars(builtins)
    errors = {n for n, one in known.items() if isinstance(one, type) and issubclass(one, Exception)}
    found = {
        "error": errors,
        "keyword": set(keyword.kwlist),
        "function": {n for n in known if n.islower() and n[0] != "_"},
        "module": {n for n in sys.stdlib_module_names if n[0] != "_"},
    }
    return {
        kind: [n for i, n in enumerate(sorted(names)) if (i % 4 == 0) == (part == "test")]
        for kind, names in found.items()
    }


def _science(draw: Random, part: str, room: int) -> Item:
    kinds = _kinds(part)
    right = draw.choice(list(kinds))
    return f"{draw.choice(kinds[right])} is a ", right, [kind for kind in kinds if kind != right]


def _open_book(draw: Random, part: str, room: int) -> Item:
    kinds = _kinds(part)
    right, *wrong = draw.sample(list(kinds), 4)
    facts = [f"{draw.choice(kinds[kind])[:8]} is a {kind}" for kind in draw.sample(list(kinds), 2)]
    return "\n".join((*facts, f"{draw.choice(kinds[right])} is a ")), right, wrong


def _passage(draw: Random, part: str, length: int) -> str:
    first, last = part_of(part)
    start = draw.randrange(first, last - length)
    return bytes(text().data[start : start + length].tolist()).decode("latin-1")


def _yes_or_no(draw: Random, part: str, room: int) -> Item:
    what = draw.choice(list(MARKS))
    asked = f"\nHas it {what}? "
    right, wrong = draw.sample(("yes", "no"), 2)
    while True:
        passage = _passage(draw, part, room - len(asked))
        if (re.search(MARKS[what], passage) is not None) == (right == "yes"):
            return passage + asked, right, [wrong]


def _reading(draw: Random, part: str, room: int) -> Item:
    asked = "\nThis is "
    right, *wrong = draw.sample(list(TOPICS), len(TOPICS))
    while True:
        passage = _passage(draw, part, room - len(asked))
        if [topic for topic, word in TOPICS.items() if word in passage] == [right]:
            return passage + asked, right, wrong


MAKERS: dict[str, tuple[Make, int]] = {  # with the bytes of a choice
    "mathqa": (_math, 2),
    "scienceqa": (_science, 8),
    "openbookqa": (_open_book, 8),
    "boolq": (_yes_or_no, 3),
    "race": (_reading, 9),
}


def multiple_choice(task: str, count: int, context: int, *, part: str, seed: int) -> Questions:
    """Draw questions of a task; arguments are those of ``cloze.questions``."""
    make, width = MAKERS[task]
    draw = Random(f"{task} {part} {seed}")
    room = context + 1 - width
    sequences, answers = [], []
    for _ in range(count):
        asked, right, wrong = make(draw, part, room)
        place = draw.randrange(len(wrong) + 1)
        before = asked.rjust(room, "\n")[-room:]
        choices = [before + one.ljust(width) for one in (*wrong[:place], right, *wrong[place:])]
        sequences.append([list(one.encode("latin-1")) for one in choices])
        answers.append(place)
    return Questions(torch.tensor(sequences), torch.tensor(answers), width)
