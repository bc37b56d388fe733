"""Recipes under config/, found through the entry-point group ``vissl_zero.recipes``."""
