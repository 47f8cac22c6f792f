"""Random numbers of a neuron: the numbers that a step draws, and the transforms that pass them to the step."""
