"""Random lives: a network lives twice, as a loop and compiled, and everything visible is compared after each act."""
