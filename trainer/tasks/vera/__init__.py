"""Vera: a T5 encoder that says how plausible a statement is.

It is trained on groups of true and false statements.
"""
