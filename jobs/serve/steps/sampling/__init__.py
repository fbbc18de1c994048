"""Samples of the Tinker dialect: requests that are logged before they are acknowledged."""
