"""Starting the processes of a run: one file a way of launching."""
