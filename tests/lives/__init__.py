"""Randomised tests of whole networks ("lives"): random acts are performed on a network with the loop and on its
compiled twin, and everything visible is compared after each act.
"""
