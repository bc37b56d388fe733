"""Exit codes of launchers and ranks beyond 0 (done), 1 (a crash) and 2 (the user's input)."""

STOPPED = 75  # saved and stopped: the same command goes on from there (EX_TEMPFAIL of sysexits.h)
INTERRUPTED = 130  # the shell's code for a process ended by Ctrl-C
