"""Groups whose experiments come of one dictionary and ranges of its keys."""
