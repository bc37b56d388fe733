"""What may be written: typed keys with their limits, composition, recipes. It decides nothing."""
