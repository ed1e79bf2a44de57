"""Search: of all ways to lay a step over ranks, the one that is simulated to be fastest and fits the memory."""
