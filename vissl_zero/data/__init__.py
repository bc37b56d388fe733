"""From files to batches: sources, transforms, the order of samples, loaders."""
