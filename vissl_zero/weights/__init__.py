"""Weights of any origin: recognition of a file's network, and export of our trunks to other libraries."""
