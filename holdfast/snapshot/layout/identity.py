"""The identity of a run, which every snapshot and checkpoint carries.

A process that finds snapshots must know whether they are its own run's, which was restarted, or
those of another experiment that used the same directory, whose names and shapes may be the same.
What a restart has in common with its run, and another experiment has not, is how it was started:
the script, its arguments, and the hyper-parameters with which the optimizer was made. A job id is
of no use: two experiments of one Slurm job share it, and one that is submitted again has two.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from holdfast import config, digest
from holdfast.errors import SnapshotMismatch

KEY = "run"  # of the identity in a state tree, and in checkpoint.json
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
_SHOWN_CHARACTERS = 300
_CONTEXT_CHARACTERS = 40


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run.

    Attributes:
        id: the user's ``run_id`` (``given``), or a random one, made when the run first started.
        command: the script and its arguments; empty in an interactive session.
        options: the hyper-parameters with which each optimizer was made, as text.
        structure: a digest of the names, shapes and dtypes of model and optimizer.
        job: the batch system's name of the job, which only messages use.
    """

    id: str
    command: str
    options: str
    structure: str
    world_size: int
    job: str = ""
    given: bool = False

    @classmethod
    def of(cls, run_id: str, model: torch.nn.Module, optimizer: object) -> "RunIdentity":
        """Return the identity of this run; ``optimizer`` is the state of its optimizer."""
        groups, jobs = groups_of(optimizer), (os.environ.get(name, "") for name in _JOB_VARIABLES)
        # In a notebook there is none, and its arguments change with every start of its kernel.
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        return cls(
            id=run_id,
            command=" ".join([os.path.realpath(script), *sys.argv[1:]]) if script else "",
            options="; ".join(dict.fromkeys(map(_shown, groups))),
            structure=_structure(model, groups),
            world_size=config.world_size(),
            job=next((job for job in jobs if job not in ("", "none")), ""),
            given=bool(run_id),
        )

    def encode(self) -> dict[str, str | int | bool]:
        """Return the identity as plain values, for a state tree and for JSON."""
        return asdict(self)

    def adopted(self, stored: object, where: str) -> "RunIdentity":
        """Return this identity with the id of the run whose state was found.

        ``stored`` is what ``encode`` gave when the state was taken; None in states of releases
        without identities, which are accepted. ``where`` it was found is for the message.

        Raises:
            SnapshotMismatch: the state is another run's; names both and what to do.
        """
        if stored is None:
            return self
        theirs = parse(stored)
        if self.given:
            if theirs.id != self.id:
                raise _another(theirs, self, where, f"its run_id is {theirs.id!r}")
            return self
        options = "optimizer's hyper-parameters"
        for field, name in {"command": "command line", "options": options}.items():
            told, own = getattr(theirs, field), getattr(self, field)
            if told != own:
                raise _another(theirs, self, where, f"its {name} {_difference(told, own)}")
        return replace(self, id=theirs.id)

    def differs(self, stored: object) -> str:
        """Return how a stored identity is not this run's; empty if it is, or if there is none."""
        if stored is None:
            return ""
        theirs = parse(stored)
        if theirs.id != self.id:
            return f"run {theirs.id!r} ({theirs.about()}), and this is run {self.id!r}"
        if theirs.structure != self.structure:
            return f"run {theirs.id!r} with another model or optimizer"
        return ""

    def about(self) -> str:
        """Describe the run in a few words."""
        job = f", job {self.job}" if self.job else ""
        return f"{_cut(self.command) or 'interactive'}{job}"


def groups_of(state: object) -> list[dict[str, Any]]:
    """Return the groups of parameters in an optimizer's state; none if it has none of its own."""
    return list(state.get("param_groups", ())) if isinstance(state, Mapping) else []


def parse(stored: object) -> RunIdentity:
    """Return the identity that ``encode`` gave, or raise SnapshotMismatch."""
    try:
        return RunIdentity(**stored)  # type: ignore[arg-type]
    except TypeError as error:
        raise SnapshotMismatch(
            f"the run's identity in the snapshot cannot be read ({error}): use the release of "
            "holdfast that wrote it, or another run_dir"
        ) from error


def _another(theirs: RunIdentity, ours: RunIdentity, where: str, why: str) -> SnapshotMismatch:
    return SnapshotMismatch(
        f"{where} holds the state of another run, {theirs.id!r} ({theirs.about()}), and this is "
        f"{repr(ours.id) if ours.given else 'a run'} ({ours.about()}): {why}. To continue that "
        f"run, give run_id={theirs.id!r} (or {config.RUN_ID_VARIABLE}); to start a new one, give "
        "another run_dir (and persist_dir), or fresh=True, which gives its snapshots up and sets "
        "its checkpoints aside"
    )


def _difference(theirs: str, ours: str) -> str:
    """Show two texts from shortly before their first difference on."""
    pairs = enumerate(zip(theirs, ours, strict=False))
    differ = next((place for place, (one, other) in pairs if one != other), 0)
    start = max(0, differ - _CONTEXT_CHARACTERS)
    shown = [f"{'…' if start else ''}{_cut(text[start:])}" for text in (theirs, ours)]
    return f"was {shown[0]!r} and is {shown[1]!r} now"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _shown(group: Mapping[str, Any]) -> str:
    """Return the hyper-parameters of a group; of the learning rate, that before a schedule."""
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "initial_lr" in values:
        values["lr"] = values.pop("initial_lr")
    return ", ".join(f"{key}={_plain(values[key])}" for key in sorted(values))


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.shape)
    return value if isinstance(value, bool | int | float | str | tuple | None) else type(value)


def _structure(model: torch.nn.Module, groups: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"{name} {tuple(value.shape)} {value.dtype}"
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    ]
    for group in groups:
        lines.append(f"{len(group['params'])} {sorted(group.keys() - {'params', 'param_names'})}")
    return digest.hexdigest("\n".join(lines).encode())
