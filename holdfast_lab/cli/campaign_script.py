"""``holdfast campaign SCRIPT.py``: a campaign on the model that a script defines."""

import argparse
import runpy
import sys
import time
import traceback
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from holdfast.cli.tables import write_json
from holdfast.errors import ConfigError, HoldfastError
from holdfast.inject import Faults, Results, campaign
from holdfast_lab.campaign.results import parquet_available
from holdfast_lab.campaign.runner import available_cores
from holdfast_lab.cli import say

NEEDED = ("model", "inputs")
TAKEN = (*NEEDED, "outcome", "faults", "run", "optimizer")
OF_PRODUCTS = ("dtype", "operator", "site", "distribution", "shape", "end_to_end", "quick", "full")
BY = (("what", "fault"), ("layer", "what", "fault"))
TRIALS = 1000


def run_script(args: argparse.Namespace) -> int:
    """Run the campaign on a script's model, write its results and print their summary."""
    for name in OF_PRODUCTS:
        if getattr(args, name):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for campaigns on products, not for a script's model")
    torch.manual_seed(args.seed)  # so that a script that draws its model can be continued
    settings = _definitions(args.script)
    if args.fault or args.what:
        pairs = product(args.fault or ("flip",), args.what or ("activation",))
        settings["faults"] = [Faults(kind, what) for kind, what in pairs]
    directory = args.out or Path("runs") / time.strftime("campaign-%Y%m%d-%H%M%S")
    workers = args.workers or _default_workers(settings["model"])
    results = campaign(
        **settings,
        trials=TRIALS if args.trials is None else args.trials,
        seed=args.seed,
        workers=workers,
        resume=directory / "trials.jsonl",
    )
    results.to_csv(directory / "trials.csv")
    if parquet_available() if args.parquet is None else args.parquet:
        results.to_parquet(directory / "trials.parquet")
    console = Console()
    say(console, str(results) + "\n")
    say(console, f"every trial: {directory / 'trials.csv'}")
    if args.json is not None:
        write_json(args.json, {"script": str(args.script), "seed": args.seed} | _summaries(results))
    return 0


def _definitions(script: Path) -> dict[str, Any]:
    """Run the script and return its names that ``campaign`` takes."""
    if not script.is_file():
        raise ConfigError(f"there is no script {script}; name a Python file")
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script)]
    try:
        names = runpy.run_path(str(script), run_name="holdfast_campaign")
        found = {name: names[name] for name in TAKEN if name in names}
        for name in NEEDED:
            if name not in found:
                raise ConfigError(
                    f"{script} defines no {name}: set model to a module and inputs to a batch or a "
                    "loader at its top level, or define functions of these names"
                )
            if callable(found[name]) and not isinstance(found[name], nn.Module):
                found[name] = found[name]()
    except HoldfastError:
        raise
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{script} raised {type(error).__name__}: {error} ({line.filename}:{line.lineno})"
        ) from error
    return found


def _default_workers(model: nn.Module) -> int:
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return available_cores() if on_cpu else 1


def _summaries(results: Results) -> dict[str, object]:
    return {"_".join(("by", *by)): results.summary(*by) for by in BY}
