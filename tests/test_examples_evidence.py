"""`examples/evidence.py`: learned time constants grow towards the time scale of the task. With them, the network solves
the task.
"""

from __future__ import annotations

import pytest
import torch
from scripts import load, one_thread

evidence = load("examples/evidence.py")
CPU = torch.device("cpu")


@one_thread()
def test_only_learned_time_constants_solve_the_task() -> None:
    fixed, learned = (evidence.train(learn, steps=200, updates=30, seed=0, device=CPU) for learn in (False, True))
    assert fixed.tau == pytest.approx([evidence.FIRST_TAU] * 2)
    assert min(learned.tau) > 4 * evidence.FIRST_TAU
    assert fixed.accuracy < 0.72
    assert learned.accuracy > 0.8
    assert sum(learned.losses[-5:]) < 0.8 * sum(fixed.losses[-5:])


def test_task_needs_many_steps() -> None:
    torch.manual_seed(0)
    clicks, answers = evidence.draw(300, 2000, CPU)
    assert clicks.unique().tolist() == [0.0, 1.0]
    rates = clicks.mean(0)
    assert rates[answers == 0].mean(0).tolist() == pytest.approx([0.34, 0.26], abs=0.01)
    predictions = (rates[:, 1] > rates[:, 0]).long()
    assert (predictions == answers).float().mean() > 0.95  # the counts of all steps determine the answer
    assert (clicks[-1, :, 1] > clicks[-1, :, 0]).eq(answers == 1).float().mean() < 0.65  # the last step alone does not
