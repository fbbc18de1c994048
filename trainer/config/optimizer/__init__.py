"""The blocks that say how weights move: optimizer, learning rate, what stands still."""
