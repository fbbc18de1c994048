"""What a run decides by its scores and by its clock: which weights are the best, and when it ends."""
