"""Parts of `FlexSN`: settings, states, choice of a backend, and execution of calls."""
