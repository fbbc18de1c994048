"""What runs inside a job: the wrapper around the training, and its host."""
