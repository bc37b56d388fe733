"""Keys of the built-in components: dataclasses only, so that a recipe is checked without importing torch."""
