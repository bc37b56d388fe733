"""The model before training: units, precision, float8, batch norm over ranks, compilation."""
