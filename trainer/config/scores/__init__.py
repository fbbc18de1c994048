"""Scores as a dictionary names them: which is better, and which decides."""
