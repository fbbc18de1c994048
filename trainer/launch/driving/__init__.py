"""A driven run, from its checked dictionary to its loop of operations."""
