"""Where the weights of an experiment come from, when that is another run. Imports no torch."""
