"""Vera: a T5 encoder that says how plausible a statement is, trained on groups."""
