"""Forecasts: what a run takes and how long a step is, at every level and tier, and which plan fits."""
