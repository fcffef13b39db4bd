"""The published values of fine-tuning: tables 3, 4 and 5, and figure 7."""

from dataclasses import dataclass
from math import nextafter, sqrt
from statistics import NormalDist

from holdfast.inject.statistics import Rate
from holdfast_lab.emulation.profile import NodeProfile, published
from holdfast_lab.study.published import Published, Range, counted, exactly

Z = NormalDist().inv_cdf(0.975)
WIDTH, TOKENS = 4096, 4096  # of Mistral-7B; the longest sequences (appendix E.3)


@dataclass(frozen=True)
class Task:
    """A data set that the paper fine-tunes on.

    Attributes:
        name: Name in the emulator's profiles.
        title: Name in the paper.
        table: Table that has its results: 3, or 5 for those that table 3 leaves out.
        rate: Learning rate (table 4).
        sequences: Number of sequences for training (table 4).
        tokens: Length of a sequence (appendix E.3).
        asked: Number of questions of the test. The paper does not print it: it is the smallest of
            which all of its percentages are whole numbers of answers.
    """

    name: str
    title: str
    table: int
    rate: float
    sequences: int
    tokens: int
    asked: int

    def source(self, quantity: str) -> str:
        """Name the table with a quantity of this task."""
        return f"table {self.table}, {self.title}, {quantity}"


COSMOS = Task("cosmosqa", "CosmosQA", 3, 5e-6, 25_260, 2048, 3790)
TASKS = (
    COSMOS,
    Task("mathqa", "MathQA", 3, 1e-5, 29_837, 2048, 2985),
    Task("scienceqa", "ScienceQA", 5, 1e-6, 12_700, 2048, 2224),
    Task("openbookqa", "OpenbookQA", 3, 2e-6, 11_920, 2048, 1000),
    Task("boolq", "BoolQ", 5, 5e-6, 9_430, 2048, 3270),
    Task("race", "RACE", 5, 1e-5, 87_900, 4096, 4934),
)
_OTHER_TASK = "a stand-in for the task and a small model, which errors move more or less than 7B"


def ruined(profile: NodeProfile, task: Task) -> bool:
    """Return whether the paper's model answered nothing after training on this node."""
    return profile.accuracy[task.name] == 0


def values(profile: NodeProfile, task: Task) -> tuple[Published, Published]:
    """Return the published disagreement in percent, and the change of accuracy in points.

    A node that agreed is silent here. Of a ruined model the second is the accuracy itself, 0.
    """
    differing = profile.disagreement[task.name]
    rate = Rate(round(differing * task.asked / 100), task.asked)
    counts = f"{differing:.2f} % of {task.asked:,}"
    differs, accuracy = task.source("disagreement"), task.source("accuracy")
    if ruined(profile, task):
        none = exactly(0.0, "not one right answer; the size of the spike is chosen for it")
        source = task.source("ruined")
        disagreement = Published(differing, source, counted(rate, counts), kind="input")
        return disagreement, Published(0.0, source, none, kind="input")
    healthy = published()["finetuning"]["healthy_accuracy"][task.name]
    value, room = profile.accuracy[task.name] - healthy, change_room(rate)
    expected = Range(value - room, value + room, f"{value:.2f} points, {counts} differ → 95 %")
    change = Published(value, accuracy, expected, _OTHER_TASK)
    if profile.silent(task.name):
        agreed = exactly(0.0, "the node agreed in every answer")
        return Published(0.0, f"{differs}, silent", agreed, kind="input"), change
    return Published(differing, differs, counted(rate, counts), _OTHER_TASK), change


def change_room(differing: Rate) -> float:
    """Return the 95 % sampling error, in points, of a change of accuracy on the same questions.

    It is that of a difference of two counts, which add up to at most the differing answers.
    """
    return float(100 * Z * sqrt(differing.value / differing.trials))


def other(task: Task, of: str) -> Published:
    """Return the published disagreement of the model without fine-tuning or of another seed."""
    value = published()["finetuning"][f"{of}_disagreement"][task.name]
    return Published(value, task.source(f"disagreement, {of.replace('_', ' ')}"))


BELOW_SEED = Published(
    None,
    "section 6.2, disagreement",
    Range(high=1.0, source="not larger than another seed's, measured here"),
    "few questions are near the boundary, and few of them make the difference",
    printed="not larger than another seed's",
)
IMPROVED = Published(
    None,
    "appendix E.5, unhealthy nodes",
    Range(nextafter(0.0, 1.0), source="better than without fine-tuning; ruined ones left out"),
    "so small a model does not learn the stand-in of BoolQ: all answer no to every question",
    printed="improved performance over the unfinetuned baseline",
)

# Figure 7, and what section 6.2 says of it. Curves are measured in units of another order's.
SPIKES = Published(
    None,
    "figure 7, spikes",
    Range(nextafter(1.0, 2.0), source="above what another order of the data does to a loss"),
    printed="significant loss spikes",
    kind="input",
)
STABILISED = Published(
    None,
    "figure 7, after a spike in the middle",
    Range(high=1.0, source="losses at the end differ less than with another order of the data"),
    printed="later the training is again stabilized",
)


def identical(source: str) -> Published:
    """Return the statement that a curve of losses is identical to the healthy node's."""
    closer = Range(high=1.0, source="closer than with another order of the data, measured here")
    return Published(None, source, closer, printed="identical to that on the healthy node")


def curve(profile: NodeProfile, task: Task) -> Published | None:
    """Return what the paper says of a node's losses; of four tasks it shows no curve."""
    if task == COSMOS:
        return SPIKES if profile.loss_spikes else identical("figure 7, other nodes")
    return identical("section 6.2, losses on OpenbookQA") if task.name == "openbookqa" else None
