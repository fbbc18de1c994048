"""Checks of a run by replaying it, and of the engine against plain torch."""
