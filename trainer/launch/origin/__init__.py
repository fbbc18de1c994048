"""What a run takes over from another run."""
