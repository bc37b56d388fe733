"""One topic a file: the rules across its keys, and the values that follow; pure functions of configuration and host."""
