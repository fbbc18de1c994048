"""Encoder states that are computed once and read from disk."""
