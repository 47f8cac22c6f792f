"""The parts of `FlexSN`: settings, states, the choice of a backend, running."""
