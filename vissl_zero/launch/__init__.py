"""Starting the processes of a run: one file per way of launching."""
