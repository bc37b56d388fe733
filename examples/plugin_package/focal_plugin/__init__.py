"""A plugin of vissl_zero: focal loss."""
