"""What a data set is before anything is trained on it: lengths, what limits cut off, padding,
duplicates, examples.
"""
