"""What a data set is before anything is trained on it.

Lengths, what limits cut off, padding, duplicates, examples.
"""
