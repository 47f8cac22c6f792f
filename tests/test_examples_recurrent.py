"""`examples/recurrent.py`: a network with recurrent weights remembers a cue, and a network without recurrent weights
forgets the cue.
"""

from __future__ import annotations

import torch
from scripts import load, one_thread

recurrent = load("examples/recurrent.py")
CPU = torch.device("cpu")


@one_thread()
def test_only_recurrent_networks_remember_the_cue() -> None:
    feedforward, recurrent_result = (
        recurrent.train(is_recurrent, steps=40, epochs=2, seed=0, device=CPU) for is_recurrent in (False, True)
    )
    assert feedforward.accuracy < 0.4
    assert recurrent_result.accuracy > 0.6
    assert recurrent_result.losses[-1] < 0.75 * feedforward.losses[-1]


def test_cue_is_only_in_the_first_steps() -> None:
    torch.manual_seed(0)
    spikes, cues = recurrent.draw(60, 2000, CPU)
    assert spikes.unique().tolist() == [0.0, 1.0]
    early, late = spikes[: recurrent.CUE_STEPS].sum(0), spikes[recurrent.CUE_STEPS :].sum(0)
    assert (early.argmax(1) == cues).float().mean() > 0.99
    assert abs((late.argmax(1) == cues).float().mean() - 0.25) < 0.1
