"""Uploaded rows: their kinds, the mistakes in a file, and what a task reads of them."""
