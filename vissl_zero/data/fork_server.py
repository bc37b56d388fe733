"""What a fork server imports first: it and the processes that it forks end with its creator, and by nothing milder.

For the fork server only, through ``lifetime.start_fork_server``: the import itself has the effect. It must come before
torch, whose import takes seconds, on a busy machine a minute, in which a fork server looks at nothing. What is passed
to it meanwhile lies in its own socket and keeps its creator's pipes open. Imports no torch.

Ctrl-C in a terminal, SLURM and systemd send what asks a run to stop to each of its processes. The ranks answer it: they
save after the next step, for which they still need their workers. So the workers ignore it; SIGKILL ends them.
"""

from __future__ import annotations

import os
import signal

from vissl_zero.lifetime import CREATOR_VARIABLE, end_with_parent

_server: int | None = os.getpid()


def _end_with_server() -> None:
    """Tie a forked process to its server; it runs before the process unpickles its work, which imports modules, too."""
    global _server
    server, _server = _server, None  # what the process forks itself has another parent
    if server is not None:
        end_with_parent(server)


for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_number, signal.SIG_IGN)  # now, not as a worker begins: what it forks inherits it
end_with_parent(int(os.environ[CREATOR_VARIABLE]))
os.register_at_fork(after_in_child=_end_with_server)
