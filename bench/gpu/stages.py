"""The stages of ``bench.gpu`` in their order, with their limits of time and their goals."""

from bench.gpu import costs, elsewhere, graphs, model, papers, products, recovery, times
from bench.gpu.stage import Goal, Stage

NEEDS_CUDA = "needs the streams, graphs and debug modes of CUDA"
BUILD_S = 240  # of 2,400, which the stages and the native build take together at most

STAGES = (
    Stage(1, "bare device", 60, products.bare),
    Stage(2, "tests that need a device", 360, elsewhere.tests),
    Stage(3, "checks against fp64", 120, products.against_fp64),
    Stage(4, "clean rows", 120, products.clean_rows),
    Stage(5, "no waiting, graphs", 180, graphs.captured, unrehearsed=NEEDS_CUDA),
    Stage(
        *(6, "times of checks", 90, times.times),
        (
            Goal("check of dW 1024 x 16384 x 1024, us", "check dW", "check_us", 18, "{:.1f}"),
            Goal("check of 4096 x 4096 x 4096, us", "check 4096", "check_us", 22, "{:.1f}"),
            Goal("encoder / copy", "encoder", "share_of_copy", 0.9, "{:.2f}", at_least=True),
            Goal("host time of a check, us", "host", "check_us", 5, "{:.1f}"),
        ),
    ),
    Stage(
        *(7, "training steps", 480, costs.costs),
        (
            *(
                Goal(f"GPT-2 medium step {mode}", "gpt2", "ratio", 1.14, contains=mode)
                for mode in ("eager", "compiled", "max-autotune")
            ),
            Goal("step of Llama 8B's layers", "llama", "ratio", 1.04),
        ),
    ),
    Stage(8, "Guard, faults in training", 90, recovery.guarded),
    Stage(
        *(9, "snapshots of 10 GB", 240, elsewhere.snapshots),
        (
            Goal("a step waits for a snapshot, s", "snapshot", "stall_s", 10e-3, "{:.4f}"),
            Goal("step with / without snapshots", "snapshot", "slowdown", 1.03),
            Goal("copy / bus", "snapshot", "share_of_bus", 0.85, "{:.2f}", at_least=True),
        ),
        "has a dry run of its own (python -m bench.snapshot_device --dry-run)",
    ),
    Stage(
        *(10, "attention", 180, elsewhere.attention),
        (Goal("attention verified / not", "verified / unverified", "ratio", 1.05),),
        "has a dry run of its own (python -m bench.attention_cuda --dry-run)",
    ),
    Stage(11, "papers' figures of GPUs", 120, papers.papers),
    Stage(
        *(12, "cost model, fitted", 120, model.model),
        (Goal("check predicted / measured - 1", "check", "error", 0.25, "{:.2f}"),),
    ),
)
