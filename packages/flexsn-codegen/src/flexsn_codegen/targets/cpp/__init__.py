"""C++ as a target: kernels for the CPU."""
