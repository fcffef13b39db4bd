"""What bit flips do to a ResNet, by place and by bit, and what protection changes.

python -m examples.injection [--trials 200] [--steps 30] [--width 64] [--workers 2] [--out DIR]
"""

import argparse
from pathlib import Path

import holdfast
from examples.injection.resnet import BATCH, CLASSES, STEPS, images, trained
from holdfast.inject import Faults, Results, campaign

PLACES = ("weight", "bias", "buffer", "activation")
LAST = "classifier.1"
BITS = (31, 30, 29, 23, 22, 12)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200, help="of each campaign")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training before")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a folder for every trial as CSV")
    args = parser.parse_args(arguments)
    model = trained(args.steps, args.width)
    inputs, classes = images(BATCH, seed=0)
    right = int((model(inputs).logits.argmax(1) == classes).sum())
    print(f"{right} of {BATCH} images right, of {CLASSES} classes\n")

    def run(name: str, faults: list[Faults], by: str) -> Results:
        results = campaign(model, inputs, faults=faults, trials=args.trials, workers=args.workers)
        print(f"{name}\n{results.table(by)}\n")
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            results.to_csv(args.out / f"{name.replace(' ', '_')}.csv")
        return results

    run("a random bit, by place", [Faults("flip", what) for what in PLACES], "what")
    run("a bit of a weight, by bit", [Faults(f"flip-{bit}", "weight") for bit in BITS], "fault")
    classifier = [Faults("flip-30", "weight", LAST), Faults("flip-30", "activation", LAST)]
    run("the classifier without protection", classifier, "what")
    with holdfast.protect(model):
        product = Faults("flip-30", "product", LAST)
        run("the classifier under protection", [classifier[0], product], "what")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
