"""What a run will take: operators against a device's rates, and the fastest way that fits."""
