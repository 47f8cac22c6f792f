"""Parts of `FlexSN`: settings, states, choice of a backend, runs."""
