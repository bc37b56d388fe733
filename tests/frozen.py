"""Imported last before processes are forked: what is there by then is out of their garbage collections.

Else each of them would look at all objects of torch, and copy their memory by that: a quarter of a second.
"""

import gc

gc.collect()
gc.freeze()
