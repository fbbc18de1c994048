"""A run before its first step: what is chosen, checked and planned, and who starts it."""
