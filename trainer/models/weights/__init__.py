"""Files of weights and what is written beside them."""
