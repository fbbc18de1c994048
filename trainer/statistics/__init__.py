"""What a data set is: lengths, what limits cut off, padding, duplicates, examples."""
