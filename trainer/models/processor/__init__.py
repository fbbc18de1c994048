"""What a processor computes in a way of its own: attention row by row, because memory is what it
waits for, and products of 16-bit numbers where it has no instructions for them.
"""
