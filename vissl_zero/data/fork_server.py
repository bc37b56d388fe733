"""The first import of a fork server: it and its forked processes end with the creator, and ignore requests to stop.

For the fork server only, through ``lifetime.start_fork_server``: importing this module has the effect. It must come
before torch, whose import takes seconds, on a busy machine a minute. Meanwhile a fork server reads nothing, and
descriptors sent to it stay in its socket and keep the creator's pipes open. So this module does not import torch.

Ctrl-C in a terminal, SLURM and systemd send the signal that stops a run to each of its processes. Ranks handle it: they
save after the next step, for which they still need their workers. So workers ignore it; SIGKILL ends them.
"""

from __future__ import annotations

import os
import signal

from vissl_zero.lifetime import CREATOR_VARIABLE, end_with_parent

_server: int | None = os.getpid()


def _end_with_server() -> None:
    """End a forked process with its server. Runs before the process unpickles its work, which imports modules."""
    global _server
    server, _server = _server, None  # processes that the process itself forks have another parent
    if server is not None:
        end_with_parent(server)


for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_number, signal.SIG_IGN)  # here, because forked workers inherit it from their first instruction
end_with_parent(int(os.environ[CREATOR_VARIABLE]))
os.register_at_fork(after_in_child=_end_with_server)
