"""Rounds of mining and training: `python -m trainer rounds`."""
