"""False alarms on healthy hardware: events and suspicions among the verified rows of a training.

    python -m bench.clean_rows [--steps N]

The line is the threshold over the row's rms at each site: smaller changes are not seen. Trains the
demo's model under protection; with no event in n rows, the rule of three bounds the
rate of false alarms by 3/n at 95 % confidence.
"""

import argparse

from bench.rows import record
from bench.training_step import DEMO, Step
from holdfast import events
from holdfast.protection import protect
from holdfast_lab.trainer.data import ByteLoader, read_corpus


def measure(dtype: str, steps: int) -> None:
    """Train and count."""
    step = Step(*DEMO, dtype)
    loader = ByteLoader(read_corpus(), context=DEMO[0].context, batch_size=DEMO[1], seed=1)
    events.clear()
    with protect(step.model) as protection:
        for _ in range(steps):
            step.batch = next(loader)
            step.bare()
        report = protection.report()
    rows = sum(site.rows for site in report.sites)
    found = len(events.recent())
    lines = sorted(site.line for site in report.sites if site.line > 0)
    record(
        "clean_rows",
        {
            "dtype": dtype,
            "steps": steps,
            "rows": rows,
            "events": found,
            "false_alarm_bound_95": 3 / rows if not found else None,
            "suspicions": sum(site.suspects for site in report.sites),
            "dismissed": report.false_alarms,
            "line_median": lines[len(lines) // 2],
            "line_worst": lines[-1],
        },
    )
    if found:
        raise SystemExit(f"{found} events on clean data: {events.recent()[0]}")


def main() -> None:
    """Both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    for dtype in ("fp32", "bf16"):
        measure(dtype, args.steps)


if __name__ == "__main__":
    main()
