"""Searches: which trials of a sweep are trained, and how far."""
