"""What a person reads of a run: display, metrics, pictures, report, comparison."""
