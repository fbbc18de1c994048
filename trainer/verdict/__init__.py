"""Whether one model is better than another on the same rows, and on which rows it is worse."""
