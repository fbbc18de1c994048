"""Looking at what was tuned: worker processes with a model each, and the routes that ask them."""
