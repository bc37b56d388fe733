"""Every derived value of a run, one topic a file; pure functions of the configuration and the host."""
