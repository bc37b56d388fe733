"""What ``torch.distributed.elastic`` does where our launcher has a property that people rely on: a real try of each.

    python benchmarks/elastic_properties.py [name ...]

Starts torch's ``LocalElasticAgent`` with its c10d rendezvous as this program's child: over a ``FileStore`` for one
machine, over a ``TCPStore`` on a listener of ours that is bound to 127.0.0.1 (``master_listen_fd``) for two. Prints one
line for each property; docs/cluster.md has them in a table. Takes three minutes. The try ``stranger`` needs root,
to be another user.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from vissl_zero.launch.key_value_store import Client, KeyValueServer
from vissl_zero.launch.process_group import LISTEN, NetworkStore, connections

OURS, SECRET = "ours", b"s" * 32  # a rendezvous on our own store, which asks for a secret
LAUNCHER = "import vissl_zero.launch.run"
ELASTIC = "import torch.distributed.elastic.agent.server.local_elastic_agent"
# What another user of the machine sends to the store: its handshake, and a value that the agents unpickle.
STRANGER = """
import base64, os, pickle, socket, struct, sys, time
class Code:
    def __reduce__(self):
        return os.system, (f"id -un > {sys.argv[2]}",)
field = lambda data: struct.pack("<Q", len(data)) + data
while True:
    try:
        sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
sock.send(bytes([0]) + struct.pack("<I", 0x3C85F7CE))
sock.send(bytes([1]) + field(b"/torch.rendezvous.run") + field(base64.b64encode(pickle.dumps(Code(), 2))))
time.sleep(1.0)
"""


def agent(node: int, num_nodes: int, restarts: int, store_name: str, run_id: str, way: str) -> None:
    """Run as one machine's launcher: two ranks on one machine, one on each of two."""
    timeout = timedelta(seconds=20)
    store: dist.Store
    if num_nodes == 1:
        store = dist.FileStore(store_name)
    elif way == OURS:
        address = ("127.0.0.1", int(store_name))
        server = KeyValueServer(address, SECRET) if node == 0 else None
        store = NetworkStore(Client(address, SECRET, 20.0), 20.0)
    else:
        port = int(store_name)
        listener = socket.create_server(("127.0.0.1", port)).detach() if node == 0 else None
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=node == 0,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener,
        )
    join = RendezvousTimeout(join=timedelta(seconds=15), last_call=timedelta(seconds=1))
    backend = C10dRendezvousBackend(store, run_id)
    handler = DynamicRendezvousHandler.from_backend(
        run_id, store, backend, num_nodes, num_nodes, local_addr="127.0.0.1", timeout=join
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=2 if num_nodes == 1 else 1,
        entrypoint=sys.executable,
        args=("-c", RANK, way),
        rdzv_handler=handler,
        max_restarts=restarts,
    )
    with tempfile.TemporaryDirectory() as logs:
        try:
            result = LocalElasticAgent(spec, DefaultLogsSpecs(logs), exit_barrier_timeout=5).run()
            messages = [str(failure.message) for failure in result.failures.values()]
            print("AGENT", result.state.name, *messages, flush=True)
        except Exception as error:  # noqa: BLE001 - what it raises is what we want to know
            print("AGENT raised", type(error).__name__, error, flush=True)
    if num_nodes > 1 and way == OURS and server is not None:
        server.close()


RANK = """
import os, signal, sys, time
from pathlib import Path
way, rank, asked = sys.argv[1], os.environ["RANK"], []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: asked.append(number))
print("RANK", rank, "started as process", os.getpid(), flush=True)
if way == "user" and rank == "1":
    sys.exit(2)
if way == "saved" and rank == "0":
    sys.exit(75)
if way not in ("", "user", "saved"):
    import datetime, torch, torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
        for step in range(1000000):
            dist.all_reduce(torch.ones(1))
            if step == 0:
                print("RANK", rank, "trains", flush=True)
            time.sleep(0.05)
            if way == "raises" and rank == "1" and step == 20:
                raise RuntimeError("the cat sat on the keyboard")
    main()
began = time.time()
while time.time() - began < 10:
    time.sleep(0.05)
    if asked:
        time.sleep(1)
        print("RANK", rank, "saved", flush=True)
        sys.exit(75)
"""


class Agent:
    """An agent as a child process, and what it has written."""

    def __init__(self, folder: Path, *, node: int = 0, nodes: int = 1, restarts: int = 0, way: str = "", run: str = ""):
        store = str(PORT) if nodes > 1 else str(folder / "store")
        words = ["--agent", str(node), str(nodes), str(restarts), store, run or "run", way]
        self._path = folder / f"agent{node}.{time.monotonic_ns()}"
        with self._path.open("wb") as out:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, __file__, *words]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    @property
    def text(self) -> str:
        """All that it and its ranks have written."""
        return self._path.read_text(errors="replace")

    @property
    def result(self) -> str:
        """What it ended with."""
        lines = [line for line in self.text.splitlines() if line.startswith("AGENT ")]
        return lines[-1][6:206] if lines else f"exit code {self.process.returncode}"

    def wait_for(self, word: str, count: int = 1) -> None:
        """Wait until its ranks have said ``word`` so often."""
        deadline = time.monotonic() + 60.0
        while self.text.count(word) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"its ranks did not come so far:\n{self.text}")
            time.sleep(0.1)

    def ranks(self) -> list[int]:
        """Process ids of its ranks, once both have started; one machine."""
        self.wait_for("started", 2)
        return [int(line.split()[-1]) for line in self.text.splitlines() if "started" in line]

    def wait(self) -> str:
        """Wait for its end; returns what it ended with."""
        try:
            self.process.wait(90.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self.result

    def send_all(self, number: int) -> None:
        """Send a signal to everything on its machine at once."""
        for pid in (self.process.pid, *(int(line.split()[-1]) for line in self.text.splitlines() if "started" in line)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


PORT = free_port()


def imports(folder: Path) -> str:
    """Processor time that a launcher needs before it can start a rank."""
    seconds: dict[str, list[float]] = {LAUNCHER: [], ELASTIC: []}
    for _ in range(3):
        for statement, found in seconds.items():
            before = os.times()
            subprocess.run([sys.executable, "-c", statement], check=True, cwd=folder)
            after = os.times()
            found.append(after.children_user + after.children_system - before.children_user - before.children_system)
    ours, theirs = (statistics.median(found) for found in seconds.values())
    return f"our launcher is imported in {ours:.2f} s of processor time, torch's agent in {theirs:.2f} s (medians of 3)"


def listens(folder: Path) -> str:
    """What listens while one machine's agent has its rendezvous in a file."""
    one = Agent(folder)
    one.ranks()
    inodes = set()
    for path in Path(f"/proc/{one.process.pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(path.readlink().name.removeprefix("socket:[").rstrip("]"))
    found = [row.local for row in connections() if row.state == LISTEN and row.inode in inodes]
    one.process.kill()
    everywhere = [local for local in found if not local.rpartition(":")[0].strip("0")]
    return f"{len(found)} socket listens, {len(everywhere)} of them on every interface"


def batch_signal(folder: Path) -> str:
    """SIGUSR1, which a batch system sends before the time limit."""
    one = Agent(folder)
    ranks = one.ranks()
    one.process.send_signal(signal.SIGUSR1)
    one.process.wait()
    alive = sum(Path(f"/proc/{pid}").exists() for pid in ranks)
    return f"the agent ends by it ({one.process.returncode}); {alive} ranks live on, {one.text.count('saved')} saved"


def killed_agent(folder: Path) -> str:
    """SIGKILL of the launcher."""
    one = Agent(folder)
    ranks = one.ranks()
    one.process.kill()
    one.process.wait()
    time.sleep(0.5)
    return f"{sum(Path(f'/proc/{pid}').exists() for pid in ranks)} of 2 ranks live on"


def user_error(folder: Path) -> str:
    """A rank that ends with exit code 2, with 2 restarts allowed."""
    one = Agent(folder, restarts=2, way="user")
    result = one.wait()
    return f"ranks were started {one.text.count('started') // 2} times: {result[:60]}"


def saved_and_stopped(folder: Path) -> str:
    """A rank that saved and stopped (75) while another is still at it, with 1 restart allowed."""
    one = Agent(folder, restarts=1, way="saved")
    result = one.wait()
    return f"ranks were started {one.text.count('started') // 2} times: {result[:60]}"


def stranger(folder: Path) -> str:
    """Another user of the machine writes to the store of a rendezvous that waits for its second machine."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.getuid() != 0 or python is None:
        return "not tried: needs root, and a Python that every user may run"
    one = Agent(folder, nodes=2)
    command = ["setpriv", "--reuid", "65534", "--clear-groups", python, "-c", STRANGER, str(PORT), f"{folder}/who"]
    subprocess.run(command, check=True, timeout=30.0)
    one.wait()
    who = folder / "who"
    return f"its code ran in the agent as {who.read_text().strip()}" if who.exists() else "its code did not run"


def other_configuration(folder: Path) -> str:
    """The second machine has another run id, the only place for a digest of the configuration."""
    first, second = Agent(folder, nodes=2, run="a"), Agent(folder, node=1, nodes=2, run="b")
    return f"machine 0: {first.wait()}; machine 1: {second.wait()}"


def lost_machine(folder: Path, way: str = "trains") -> str:
    """The second machine says nothing any more, as if its link were cut, while ranks train; timeout 10 s."""
    first, second = Agent(folder, nodes=2, way=way), Agent(folder, node=1, nodes=2, way=way)
    first.wait_for("trains")
    second.send_all(signal.SIGSTOP)
    result = first.wait()
    second.send_all(signal.SIGKILL)
    return f"machine 0: {result}"


def lost_machine_on_our_store(folder: Path) -> str:
    """The same, with our server in the place of torch's store."""
    return lost_machine(folder, OURS)


def lost_first_machine(folder: Path) -> str:
    """The first machine is killed and its command given again, with 2 restarts allowed."""
    first = Agent(folder, nodes=2, restarts=2, way="trains")
    second = Agent(folder, node=1, nodes=2, restarts=2, way="trains")
    second.wait_for("trains")
    first.send_all(signal.SIGKILL)
    first.process.wait()
    again = Agent(folder, nodes=2, restarts=2, way="trains")
    return f"machine 1: {second.wait()[:60]}; machine 0 again: {again.wait()[:60]}"


def others_error(folder: Path) -> str:
    """Rank 1, on machine 1, raises: what machine 0 says."""
    first, second = Agent(folder, nodes=2, way="raises"), Agent(folder, node=1, nodes=2, way="raises")
    result, _ = first.wait(), second.wait()
    return f"machine 0 {'has' if 'cat sat' in first.text else 'does not have'} its text: {result[:160]}"


TRIES = (imports, listens, batch_signal, killed_agent, user_error, saved_and_stopped, stranger)
TRIES_OF_TWO = (other_configuration, lost_machine, lost_machine_on_our_store, lost_first_machine, others_error)


def main() -> None:
    """Try all, or those named."""
    global PORT
    for attempt in (*TRIES, *TRIES_OF_TWO):
        if len(sys.argv) == 1 or attempt.__name__ in sys.argv[1:]:
            PORT = free_port()
            with tempfile.TemporaryDirectory() as name:
                print(f"{attempt.__name__}: {attempt(Path(name))}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--agent"]:
        node, nodes, restarts = map(int, sys.argv[2:5])
        agent(node, nodes, restarts, *sys.argv[5:8])
    else:
        main()
