"""What is done to that which a model reads."""
