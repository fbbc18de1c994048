"""Public sets of data that the built-in groups train on, fetched into the layout that they want."""
