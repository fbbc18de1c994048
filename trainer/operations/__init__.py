"""The log of operations of a driven run, which the server writes and the ranks follow."""
