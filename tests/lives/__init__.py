"""Random lives: a network lives twice, as a loop and compiled, and all that shows is compared after each act."""
