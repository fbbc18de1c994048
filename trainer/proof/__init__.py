"""What is believed only once it was seen: a run replayed, an engine examined."""
