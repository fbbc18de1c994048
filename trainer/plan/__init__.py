"""Memory and time of a run, predicted before it is launched."""
