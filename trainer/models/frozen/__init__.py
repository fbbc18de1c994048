"""What of a model does not train: which weights, and in how many bits."""
