"""The recipe for TensorBoard in the documentation: it runs as printed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Guard, events

PAGE = Path(__file__).parents[1] / "docs" / "monitoring.md"


@pytest.mark.compile  # TensorBoard takes seconds to import
def test_the_recipe_for_tensorboard_logs_losses_and_events(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = re.search(r"\*\*TensorBoard\*\*\n\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert recipe is not None
    assert recipe[1].count("\n") <= 13
    model = nn.Linear(4, 1)
    strike = [True]

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        if guard.steps_done == 2 and strike:
            strike.clear()
            model.weight.grad.fill_(torch.nan)
        return loss

    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with guard:
        given = {"log_dir": str(tmp_path), "guard": guard, "forward_backward": forward_backward}
        exec(recipe[1], given | {"batches": [torch.ones(2, 4)] * 4})
    events.clear()
    written = reading.EventAccumulator(str(tmp_path))
    written.Reload()
    assert [scalar.step for scalar in written.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [tensor.step for tensor in written.Tensors("holdfast/rerun/text_summary")] == [2]
