"""A group of experiments that is trained by one process on one frozen base (--together)."""
