"""The output of a run for people: display, metrics, pictures, report, comparison."""
