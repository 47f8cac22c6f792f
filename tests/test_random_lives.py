"""A network lives twice, as a loop and compiled; after each act of its user, all that shows is the same."""

from __future__ import annotations

from random_lives.machine import machine, run


def test_lives_are_the_same(compiler: None) -> None:
    run(machine(), runs=100, rules=30)
