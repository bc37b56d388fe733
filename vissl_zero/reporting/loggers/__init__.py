"""Places that figures go to besides ``metrics.jsonl``, one file each (``HOOKS.LOGGERS``)."""
