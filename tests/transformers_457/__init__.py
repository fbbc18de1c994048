"""The environment of transformers 4.57, in which exports are loaded as other people load them."""
