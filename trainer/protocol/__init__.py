"""What a task must say, and what it may be able to do."""
