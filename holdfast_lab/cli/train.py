"""``holdfast train``: train the demo's GPT on a folder of text, under a schedule of faults."""

import argparse
import time
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from holdfast.cli.progress import TrainingProgress, sparkline, training_progress
from holdfast.cli.tables import check_writable, write_json
from holdfast.errors import ConfigError
from holdfast.inject.schedule import load_schedule
from holdfast.torchrun import interruptible
from holdfast_lab.cli import say
from holdfast_lab.trainer.data import ByteLoader, read_corpus
from holdfast_lab.trainer.gpt import GPTConfig
from holdfast_lab.trainer.hosts import kind_here
from holdfast_lab.trainer.launch import train
from holdfast_lab.trainer.settings import DTYPES, MODES, Settings
from holdfast_lab.trainer.storm import anatomy, check, outcomes

NUMBERS = {
    "steps": "optimizer steps",
    "nodes": "hosts to divide the ranks among, made on this machine",
    "batch_size": "sequences a rank and step",
    "seed": "of weights, data and dropout",
    "lr": "highest learning rate",
    "weight_decay": "of matrices and embeddings",
    "clip_grad_norm": "largest gradient norm",
    "layers": "transformer blocks",
    "heads": "attention heads",
    "width": "of the residual stream",
    "context": "bytes a sequence",
    "dropout": "share of activations dropped",
    "at_rest": "share of the state compared with its digests in each step",
    "persist_every": "steps between checkpoints on disk, in the run directory; 0: never",
}


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``train`` to the command line."""
    defaults, model = Settings(), GPTConfig()
    parser = subparsers.add_parser(
        "train",
        description="Train a byte-level GPT on a folder of text, protected, with a snapshot in "
        "memory after every step. With --nodes, hosts are made on this machine: network namespaces "
        "where root and iproute2 allow, else process groups; a schedule may lose them whole.",
    )
    add = parser.add_argument
    add("--data", metavar="DIR", type=str, help="folder of text (default: the standard library)")
    add("--run-dir", metavar="DIR", type=Path, help="default: runs/train-<date>-<time>")
    add("--resume", action="store_true", help="continue an interrupted run from its snapshots")
    add("--schedule", metavar="FILE", type=Path, help="TOML file of faults to inject")
    modes = "; ".join(f"{name}: {text}" for name, text in MODES.items())
    add("--mode", choices=MODES, default=defaults.mode, help=f"{modes} (default guarded)")
    add("--dtype", choices=DTYPES, default=defaults.dtype, help="bf16 is autocast (default fp32)")
    add("--audit", metavar="SHARE", type=float, default=0.0, help="share of steps computed twice")
    queued = "verify products as those of a GPU are, by checks that are read once a step"
    add("--queued-checks", action="store_true", help=queued)
    ranks = "data-parallel processes, on all nodes together (default 2, or one a node)"
    add("--ranks", metavar="N", type=int, help=ranks)
    warmup = "steps of linear warm-up (default 10, or all but one of a shorter run)"
    add("--warmup-steps", metavar="N", type=int, help=warmup)
    for name, text in NUMBERS.items():
        value = getattr(model if hasattr(model, name) else defaults, name)
        metavar = "N" if isinstance(value, int) else "X"
        text = f"{text} (default {value})"
        add(_flag(name), metavar=metavar, type=type(value), default=value, help=text)
    add("--json", metavar="FILE", type=Path, help="also write the result to FILE")
    parser.set_defaults(run=run)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_of(args: argparse.Namespace) -> Settings:
    """Make the settings that the parsed command line describes."""
    if args.data == "":
        raise ConfigError("--data is empty: name a folder of text, or leave it out")
    names = {item.name for item in fields(Settings)} - {"model"}
    values = {name: getattr(args, name) for name in names}
    if args.warmup_steps is None:
        values["warmup_steps"] = max(0, min(Settings.warmup_steps, args.steps - 1))
    if args.ranks is None:
        values["ranks"] = args.nodes if args.nodes > 1 else Settings.ranks
    values["data"] = str(Path(args.data).absolute()) if args.data else None
    sizes = {name: getattr(args, name) for name in ("layers", "heads", "width", "context")}
    return Settings(**values, model=GPTConfig(**sizes, dropout=args.dropout))


def described(settings: Settings) -> str:
    """Describe how the hosts of a run are emulated on this machine, and why in this way."""
    kind, reason = kind_here()
    because = f" ({reason})" if reason else ""
    return f"{settings.nodes} hosts × {settings.ranks // settings.nodes} ranks: {kind}{because}"


def run(args: argparse.Namespace) -> int:
    """Train to the end and return 0; all input is checked before anything is started."""
    interruptible()
    check_writable(args.json)
    console = Console()
    settings = settings_of(args)
    corpus = read_corpus(Path(settings.data) if settings.data else None)
    shape = {"context": settings.model.context, "batch_size": settings.batch_size}
    ByteLoader(corpus, **shape, seed=settings.seed)  # raises if the corpus does not fit
    faults = load_schedule(args.schedule) if args.schedule else []
    sizes = {"steps": settings.steps, "ranks": settings.ranks, "nodes": settings.nodes}
    check(faults, anatomy(settings.model), **sizes)
    run_dir = args.run_dir or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    say(console, f"{corpus.description}; the run is kept in {run_dir}")
    if settings.nodes > 1:
        say(console, described(settings))
    with training_progress(console) as progress:
        watch = TrainingProgress(progress, "train", settings.steps)
        result = train(run_dir, settings, faults, resume=args.resume, watch=watch)
    last = result.losses[max(result.losses)]
    console.print(f"loss {sparkline(result.losses)} {last:.4f}", highlight=False)
    say(console, f"weights: {run_dir / 'model.safetensors'}")
    if args.json is not None:
        write_json(
            args.json,
            {
                "run_dir": str(run_dir),
                "seconds": result.seconds,
                "digests": result.digests,
                "losses": result.losses,
                "faults": [outcome.as_dict() for outcome in outcomes(result.events)],
            },
        )
    return 0
