"""Engines behind one interface, and the communicator on the CPU."""
