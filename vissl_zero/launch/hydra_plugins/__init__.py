"""The folder that ``sweep.register_launcher`` adds to the namespace package ``hydra_plugins``."""
