"""What a frozen model says of each row: computed once, then read from the disk."""
