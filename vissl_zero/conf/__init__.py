"""Hydra's root configuration as package data; recipes lie in ``configs/config/`` at the top."""
