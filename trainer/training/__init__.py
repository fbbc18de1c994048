"""The step loop and what a run of it needs."""
