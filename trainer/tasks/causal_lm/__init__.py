"""Next-token language modelling: the base models that other tasks build on."""
