"""VISSL's heritage: keys without effect here, second names, forms of methods, programs."""
