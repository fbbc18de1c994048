"""What an experiment dictionary may say, what it means, and its id. Imports no torch."""
