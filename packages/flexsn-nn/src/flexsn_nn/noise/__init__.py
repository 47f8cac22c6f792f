"""Random numbers that a neuron's step draws, and the transforms that pass their places to the step."""
