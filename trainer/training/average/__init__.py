"""The average of a run's weights over its steps."""
