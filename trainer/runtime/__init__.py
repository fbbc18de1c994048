"""What a process of a run stands on: ranks, random state, the machine's devices."""
