"""The live page of the service, which shows every run while it trains, and its data."""
