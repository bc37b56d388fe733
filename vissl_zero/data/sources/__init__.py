"""Places that images are read from: folders, lists, archives, databases, library sets."""
