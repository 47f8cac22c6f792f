"""Randomised tests of whole networks. One test is a "life": the same random acts are performed on a network that runs
the loop, and on its compiled twin. After each act, everything visible is compared.
"""
