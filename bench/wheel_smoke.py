"""The program that ``bench.wheel`` runs with an installed wheel: prints one line of JSON.

It runs in an empty folder, on an interpreter whose environment has holdfast and what it requires.
"""

import json
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Train a step protected, repair a fault, and restore a snapshot, each compared bit for bit."""
    began = time.perf_counter()
    import torch

    import holdfast
    from holdfast import native

    imported = time.perf_counter()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 64)

    def gradients() -> list[torch.Tensor]:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    protection = holdfast.protect(model)
    healthy = gradients()
    first_s = time.perf_counter() - began
    struck = _struck(gradients)
    repaired = all(map(torch.equal, struck, healthy))
    kinds = [event.kind for event in holdfast.events.recent()]
    optimizer.step()
    protection.remove()
    restored = _restored(model, optimizer)
    folder = Path(holdfast.__file__).parent
    result = {
        "native": native.core is not None,
        "repaired": repaired,
        "events": kinds,
        "restored": restored,
        "import_s": round(imported - began, 2),
        "first_protected_step_s": round(first_s, 2),
        "installed_bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
    }
    print(json.dumps(result))


def _struck(gradients):  # type: ignore[no-untyped-def]
    """Run a pass in which the first product gets a wrong element."""
    from holdfast.inject import arm, disarm

    done = []

    def strike(stage, site, gemm, output):  # type: ignore[no-untyped-def]
        if stage == "output" and not done:
            done.append(site)
            output[..., 0, 0] = 1e9

    arm(strike)
    try:
        return gradients()
    finally:
        disarm()


def _restored(model, optimizer) -> bool:  # type: ignore[no-untyped-def]
    """Damage the weights after a snapshot, restore it, and compare."""
    import torch

    from holdfast import Snapshots

    with tempfile.TemporaryDirectory() as folder:
        with Snapshots(model, optimizer, run_dir=folder) as snapshots:
            kept = [p.detach().clone() for p in model.parameters()]
            snapshots.begin(1)
            snapshots.wait_committed()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            step = snapshots.restore()
        return step == 1 and all(map(torch.equal, kept, model.parameters()))


if __name__ == "__main__":
    main()
