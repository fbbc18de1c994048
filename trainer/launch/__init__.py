"""Everything before the first step of a run: choices, checks, plans, and the start itself."""
