"""Seeded mutations of every kind of file that we read weights from, and processes to read them in."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import pickle
import pickletools
import random
import resource
import select
import shutil
import signal
import struct
import tempfile
import traceback
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.unit.commands.example_checkpoint import state_of, tiny_model, write_checkpoint
from tests.unit.commands.vissl_files import consolidated, optimizer_groups, save_sharded, save_sliced, trained
from vissl_zero.checkpoint.folder import read_json, write_json
from vissl_zero.cli import main
from vissl_zero.errors import CheckpointError
from vissl_zero.evaluation.trunk import load_trunk

TIMEOUT_S = 60.0
HEADROOM_BYTES = 2**31  # of address space, over what the process has when it begins


class Called:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None):
        self.function, self.arguments, self.state = function, arguments, state

    def __deepcopy__(self, memo: Any) -> Called:
        return self

    def __reduce__(self) -> Any:
        return (self.function, self.arguments, self.state) if self.state else (self.function, self.arguments)


def make_seeds(folder: Path) -> list[str]:
    """Write a sound file, or folder of files, of every kind; their names."""
    model = tiny_model(num_classes=10)
    content = consolidated(model)
    content["classy_state_dict"]["optimizer"] = trained(
        torch.optim.SGD(optimizer_groups(model, True, False), lr=0.1, momentum=0.9)
    )
    for name in ("consolidated", "legacy", "shards", "slices", "plain", "safetensors", "ours", "run"):
        (folder / name).mkdir(parents=True)
    torch.save(content, folder / "consolidated/a.torch")
    torch.save(content, folder / "legacy/a.torch", _use_new_zipfile_serialization=False)
    save_sharded(model, folder / "shards/a.torch", world_size=2, flatten=True)
    save_sliced(model, folder / "slices/a.torch")
    plain = {name: tensor.numpy() if "stem" in name else tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": plain, "epoch": np.int64(3)}, folder / "plain/a.torch")
    save_file(dict(model.state_dict()), folder / "safetensors/a.safetensors")
    config = {
        "MODEL": {"TRUNK": {"NAME": "regnet", "REGNET": TRUNK}, "HEAD": {"PARAMS": []}, "FEATURE_EVAL_SETTINGS": {}},
        "IMPORTS": [],
        "DATA": {},
    }
    write_checkpoint(folder / "run/a", state_of(model), 4, config)
    assert main(["checkpoint", "export", str(folder / "run/a"), "--to", str(folder / "ours/a.safetensors")]) == 0
    return ["consolidated", "legacy", "shards", "slices", "plain", "safetensors", "ours", "run"]


TRUNK = {"depth": 4, "w_0": 16, "w_a": 16.0, "w_m": 2.0, "group_width": 8, "stem_width": 16}


def mutate(folder: Path, rng: random.Random) -> str:
    """Spoil one file of a copy of a seed; what was done."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    ways: list[Callable[[Path, random.Random], None]] = [_bytes]
    if path.suffix == ".json":
        ways += [_json] * 3
    elif path.suffix == ".safetensors":
        ways += [_header] * 3
    else:
        ways += [_objects] * 3 + [_opcodes] * 3
    way = rng.choice(ways)
    way(path, rng)
    return f"{way.__name__} of {path.relative_to(folder)}"


def read_everything(folder: Path, good: Path, with_recipe: bool) -> None:
    """Every reader of ours. Anything but an exit code or a ``CheckpointError`` is a defect.

    Args:
        with_recipe: compare with a recipe's model too, which takes most of the time.
    """
    path = next(folder.glob("a*"))
    target = folder / "out.safetensors"
    words = [
        ["import", path, "--to", target, "--overwrite"],
        ["import", path, "--to", folder / "imported", "--partial", *(["config=supervised/digits", SGD] * with_recipe)],
    ]
    if path.suffix != ".torch":
        words = [
            ["inspect", path, "--tensors", "--config"],
            ["verify", path],
            ["diff", path, good / path.name],
            ["export", path, "--to", folder / "out.pt", "--overwrite"],
            words[0],
        ]
    for some in words:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main(["checkpoint", *map(str, some)])
        assert code in (0, 1, 2), code
        assert "\x1b" not in output.getvalue() and "\x07" not in output.getvalue(), output.getvalue()
        assert "Traceback" not in output.getvalue(), output.getvalue()
    if path.is_dir():
        with contextlib.suppress(CheckpointError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_trunk(path)


SGD = "config.OPTIMIZER.name=sgd"


def in_a_process(work: Callable[[int], None]) -> tuple[str, str]:
    """Fork, and call ``work`` with a limit on memory; what it wrote, and how it ended if that is not as it should.

    Args:
        work: gets the file descriptor to write to, and writes something every ``TIMEOUT_S`` at least.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(receiver)
            torch.set_num_threads(1)  # the threads of the parent are not there
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (in_use + HEADROOM_BYTES,) * 2)
            work(sender)
            code = 0
        except BaseException:  # noqa: BLE001 - each is what is looked for
            os.write(sender, traceback.format_exc()[-3000:].encode(errors="replace"))
        finally:
            os._exit(code)
    os.close(sender)
    text, ended = b"", ""
    while not ended:
        if not select.select([receiver], [], [], TIMEOUT_S)[0]:
            ended = f"no end within {TIMEOUT_S:g} s"
        elif part := os.read(receiver, 2**16):
            text += part
        else:
            break
    os.close(receiver)
    if ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text.decode(errors="replace"), ended or (f"the process ended ({status})" if status else "")


def fuzz(count: int, seed: int) -> list[str]:
    """Read ``count`` spoilt files, many to a process; a sentence for each that ended other than it should."""
    with tempfile.TemporaryDirectory(prefix="vissl_zero_fuzz_") as name:
        seeds, work = Path(name) / "seeds", Path(name) / "work"
        kinds, found, first = make_seeds(seeds), [], 0
        while first < count:
            numbers = range(first, count)
            text, ended = in_a_process(partial(_read_each, numbers, seed, seeds, kinds, work))
            first += text.count(_OK) + 1
            if ended:
                found.append(f"{text.rpartition(_OK)[2]} {ended}")
        return found


_OK = "-> ok\n"


def _read_each(numbers: Sequence[int], seed: int, seeds: Path, kinds: list[str], work: Path, sender: int) -> None:
    for number in numbers:
        rng, kind = random.Random(f"{seed} {number}"), kinds[number % len(kinds)]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(seeds / kind, work)
        os.write(sender, f"{number} ({kind}: {mutate(work, rng)}) ".encode())
        read_everything(work, seeds / kind, with_recipe=number % 10 == 0)
        os.write(sender, _OK.encode())


def _bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 20))):
        place, way = rng.randrange(max(len(data), 1)), rng.randrange(6)
        if rng.random() < 0.5:
            place = min(place, rng.randrange(2000))  # headers stand in front
        if way == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif way == 1:
            data[place : place + 8] = rng.choice(
                (b"\0" * 8, b"\xff" * 8, struct.pack("<Q", 2**40), b"\x7f" + b"\xff" * 7)
            )
        elif way == 2:
            del data[place : place + rng.choice((1, 8, 1000))]
        elif way == 3:
            data[place:place] = rng.randbytes(rng.choice((1, 8, 100)))
        elif way == 4:
            other = rng.randrange(max(len(data), 1))
            data[place:place] = data[other : other + rng.choice((8, 100, 1000))]
        elif rng.random() < 0.3:
            del data[place:]
    path.write_bytes(data)


_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, -1.0, float("nan"), 1e308, "", "x", "\ud800"),
    *("\x1b[2J\x07", "../../etc/passwd", "rank00000", "F32", "${oc.env:HOME}", "x" * 10_000, [], [[]], [1, 2], {}),
    *({"a": 1}, [None] * 1000, [2**31] * 8, [0] * 100, {"x": {"x": {}}}),
]


def _deep() -> Any:
    tree: Any = []
    for _ in range(300):  # copying takes two frames a level, and Python has 1,000
        tree = [tree]
    return tree


def _change(tree: Any, rng: random.Random, values: Sequence[Any]) -> Any:
    """A copy with a node somewhere replaced, dropped, renamed or doubled."""
    tree = copy.deepcopy(tree)
    node, way_down = tree, rng.choice((1, 2, 3, 4, 6, 9))
    for _ in range(way_down):
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        deeper = [child for child in inner if isinstance(child, (dict, list)) and child]
        if not deeper:
            break
        node = rng.choice(deeper)
    if not node:
        return tree
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    value, way = rng.choice(values), rng.randrange(5)
    if way <= 2:
        node[key] = value() if callable(value) else value
    elif way == 3 and isinstance(node, dict):
        node[value if isinstance(value, str) else "other"] = node.pop(key)
    elif way == 3:
        node.insert(key, copy.deepcopy(node[key]))
    else:
        del node[key]
    return tree


def _json(path: Path, rng: random.Random) -> None:
    """Change what a manifest says, with checksums that fit, as an attacker would."""
    body, _ = read_json(path)
    folder = path.parent
    for _ in range(rng.choice((1, 1, 2, 5))):
        body = _change(body, rng, [*_VALUES, _deep])
    path.unlink()
    try:
        digest = write_json(path, body)
    except (ValueError, RecursionError):  # NaN: not what we would write, but what somebody can
        path.write_text(json.dumps({"format": "vissl_zero checkpoint", "format_version": 1, "body": 0, "xxh3": ""}))
        return
    if path.name != "manifest.json":
        manifest, _ = read_json(folder / "manifest.json")
        manifest["ranks"][path.stem] = digest
        (folder / "manifest.json").unlink()
        write_json(folder / "manifest.json", manifest)


def _header(path: Path, rng: random.Random) -> None:
    """Change the header of a safetensors file; half of the time the file stays as long as its header says."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 2, 5))):
        header = _change(header, rng, [*_VALUES, _deep])
    if rng.random() < 0.3:  # tensors without data, of a size that overflows
        header["x"] = {
            "dtype": "F32",
            "shape": rng.choice(([2**62, 0], [0] * 65, [2**31, 2**31, 4])),
            "data_offsets": [0, 0],
        }
    if rng.random() < 0.3 and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"].pop("vissl_zero_xxh3", None)
        header["__metadata__"].pop("vissl_zero", None)
    text = json.dumps(header).encode()
    rest = data[8 + length :]
    path.write_bytes(struct.pack("<Q", len(text)) + text + (rest if rng.random() < 0.5 else rest + bytes(4)))


def _hostile_objects() -> list[Any]:
    rebuild, storage = torch._utils._rebuild_tensor_v2, torch.ones(4).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    flags = [Called(np.dtype, text, False, True, state=state) for text, state in _DTYPES]
    arrays = [
        Called(np._core.multiarray._reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, data))
        for dtype in flags
        for shape, data in (((1,), b"A" * 8), ((2**40,), b""), ((-1, -8), b"A" * 8), ((1,), [1]))
    ]
    return [
        *(Called(rebuild, typed, *rest, False, OrderedDict()) for rest in _PLACES),
        *(Called(np._core.multiarray.scalar, dtype, b"A" * 8) for dtype in flags),
        *arrays,
        *(Called(torch.storage.UntypedStorage, size) for size in (2**45, -1)),
        Called(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, (torch.tensor([[9]]), torch.ones(1), (2,))),
        Called(torch._utils._rebuild_parameter, "x", True, OrderedDict()),
        Called(torch._utils._rebuild_nested_tensor, torch.ones(2), *[torch.tensor([[2**40]])] * 3),
        Called(
            torch._utils._rebuild_qtensor, typed, 0, (4,), (1,), (torch.per_tensor_affine, 0.0, 0), False, OrderedDict()
        ),
        Called(torch.Size, (2**40,)),
        Called(torch.device, "meta"),
        Called(bytearray, 2**45),
        Called(os.system, "true"),
        *(torch.ones(1).expand(2**40), torch.ones(2, dtype=torch.complex64), torch.ones(3, 3).to_sparse()),
        *(torch.ones(2, dtype=torch.float8_e4m3fn), torch.zeros(0, 2**40), torch.ones(2, device="meta")),
        *_quantized(),
        *(np.array(["x", None], dtype=object), np.array(["a\x1b[2J"]), np.zeros((2, 3), order="F"), np.float16(1.0)),
        *(np.zeros(2, dtype=">f4"), np.zeros(1, dtype=[("a", "O")]), np.datetime64("2020-01-01"), np.longdouble(1)),
    ]


def _quantized() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)]


_DTYPES = [
    ("V8", (3, "|", None, ("a",), {"a": (Called(np.dtype, "O"), 0)}, 8, 1, 1)),
    ("V8", (3, "|", (Called(np.dtype, "O"), (1,)), None, None, 8, 1, 63)),
    ("f8", (3, "<", None, None, None, -1, -1, 0)),
    ("f8", (3, ">", None, None, None, 2**40, 2**40, 63)),
    ("i8", 3),
    ("O8", (3, "|", None, None, None, -1, -1, 63)),
]
_PLACES = [
    (0, (2**40,), (1,)),
    (-1, (4,), (1,)),
    (2**62, (4,), (1,)),
    (0, (4,), (-1,)),
    (0, (2**62, 4), (1, 1)),
    (0, "x", 3),
]
_HOSTILE = _hostile_objects()


def _objects(path: Path, rng: random.Random) -> None:
    """Change what a file of ``torch.save`` holds."""
    content = torch.load(path, weights_only=False)
    for _ in range(rng.choice((1, 1, 2, 5))):
        content = _change(content, rng, [*_VALUES, *_HOSTILE, *_HOSTILE, _deep])
        if rng.random() < 0.1 and isinstance(content, dict):
            content[rng.choice(((1, 2), ("a", ("b",)), 3, None, 2.5, b"x", "\x1b[2J"))] = rng.choice(_HOSTILE)
    try:
        torch.save(content, path, _use_new_zipfile_serialization=rng.random() < 0.7)
    except Exception:  # noqa: BLE001 - not what torch can write
        _bytes(path, rng)


def _opcodes(path: Path, rng: random.Random) -> None:
    """Drop, double, swap and change opcodes of the pickle, in an archive that is otherwise sound."""
    if not zipfile.is_zipfile(path):
        _bytes(path, rng)
        return
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    data = members[name]
    starts = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(starts)]
    for _ in range(rng.choice((1, 2, 5, 20))):
        place, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        way = rng.randrange(5)
        if way == 0:
            del parts[place]
        elif way == 1:
            parts.insert(place, parts[other])
        elif way == 2:
            parts[place], parts[other] = parts[other], parts[place]
        elif way == 3:
            parts[place] = rng.choice(_OPCODES)
        else:
            parts.insert(place, rng.choice(_OPCODES))
    members[name] = b"".join(parts)
    with zipfile.ZipFile(
        path, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for name, member in members.items():
            archive.writestr(name, member)


_OPCODES = [
    *(pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ, pickle.TUPLE2, pickle.TUPLE, pickle.DUP, pickle.POP, pickle.MARK),
    *(pickle.SETITEMS, pickle.APPENDS, pickle.BINPERSID, pickle.STOP, pickle.EMPTY_DICT, pickle.NONE),
    *(pickle.EMPTY_TUPLE, b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\xff", b"X\xff\xff\xff\xff"),
    *(b"J\xff\xff\xff\x7f", b"\x8a\xff" + b"\x7f" * 255),
    *(f"c{module}\n{name}\n".encode() for module, name in (
        ("torch", "FloatStorage"), ("torch.storage", "UntypedStorage"), ("torch._utils", "_rebuild_tensor_v2"),
        ("numpy", "dtype"), ("numpy", "ndarray"), ("numpy.core.multiarray", "scalar"), ("collections", "OrderedDict"),
        ("numpy.core.multiarray", "_reconstruct"), ("os", "system"), ("torch", "Tensor"), ("torch", "float32"),
        ("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_sparse_tensor"), ("_codecs", "encode"),
    )),
]  # fmt: skip
