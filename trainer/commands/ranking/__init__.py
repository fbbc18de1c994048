"""Commands that order the passages of a ranking anew."""
