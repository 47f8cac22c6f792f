"""Random numbers of a neuron: which ones a step draws, and the transform by which they reach it."""
