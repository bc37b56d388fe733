"""The fast backend (``DATA.BACKEND: fast``): images stay arrays of 8 bits from the decoder to the batch."""
