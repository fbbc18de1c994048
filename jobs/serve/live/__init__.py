"""The page of the service that shows every run while it trains, and what it is told."""
