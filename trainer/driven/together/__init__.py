"""Driven runs in one process: one frozen base and its forward, adapters of each run."""
