"""Hidden states of contexts, computed once by a frozen model and read from the disk in training."""
