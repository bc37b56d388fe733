"""Optimizer state and parameters in host memory or on NVMe."""
