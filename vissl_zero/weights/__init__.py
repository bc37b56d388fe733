"""Weights of any origin: which network a file is of, and our trunks as folders that other libraries open."""
