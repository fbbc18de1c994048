"""The published training sets and their files."""
