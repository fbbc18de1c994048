"""A run from its dictionary to its exit code: what is chosen, checked and planned before its first step."""
