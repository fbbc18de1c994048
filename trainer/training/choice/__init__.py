"""What a run decides by its scores and its clock: which weights are best, and when it ends."""
