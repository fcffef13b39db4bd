"""Two ranks of DDP by Hugging Face's Trainer, forked from the tests' process.

They write the digests of a bare run, and of a guarded one with an INF on one rank, which is killed.
"""

import gc
import json
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from contract import INF, Place, Striker, forked, kinds, outcome
from transformers_program import TrainerProgram

RANKS = 2
STRUCK, KILLED = (2, 1), (5, 1)


def train(rank: int, port: int, folder: Path, life: str) -> None:
    """One rank of one run."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that was forked
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    here |= {"MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()}, MASTER_ADDR="127.0.0.1")
    strike = Striker({STRUCK: INF})

    def on_pass(place: Place) -> float | None:
        if life == "first" and rank == 1:
            if place == KILLED:
                (folder / "kinds").write_text(json.dumps(kinds("rerun")))
                os.kill(os.getpid(), signal.SIGKILL)
            return strike(place)
        return None

    TrainerProgram.changed, TrainerProgram.rows = {"ddp_backend": "gloo"}, 24 * RANKS
    program = TrainerProgram(folder / life)
    digest = outcome(program, on_pass, run_dir=None if life == "bare" else folder / "run")
    result = {"digest": digest, "resumed": program.resumed}
    (folder / f"{life}.{rank}").write_text(json.dumps(result))
    del program
    gc.collect()  # or gloo's threads can hang this process
    torch.distributed.destroy_process_group()


def launch(folder: Path, life: str) -> None:
    """Run all ranks; if one dies the others are ended, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {forked(partial(train, rank, port, folder, life)) for rank in range(RANKS)}
    while ranks:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.discard(pid)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
        time.sleep(0.02)
