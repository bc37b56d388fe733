"""Imports between rooms go one way, and the rooms that answer --help import no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vissl_zero"
ANYONE = {
    "errors",
    "registry",
    "collectives",
    "atomic",
    "imports",
    "lifetime",
    "terminal",
    "torchvision_compat",
    "version",
}
# room -> rooms it may import
_BASE = {"config", "resolve"}
ALLOWED = {
    "vissl": set(),
    "config": {"vissl"},
    "resolve": {"config", "vissl"},
    "models": _BASE,
    "methods": _BASE | {"models"},
    "data": _BASE,
    "optim": _BASE | {"vissl"},
    "sharding": _BASE | {"models", "methods", "data", "optim"},
    "integration": _BASE | {"optim", "sharding", "checkpoint", "planner"},
    "engine": _BASE | {"models", "methods", "data", "optim", "sharding"},
    "planner": _BASE | {"models", "methods", "data", "optim", "sharding", "engine"},
    "checkpoint": _BASE | {"models", "methods", "data", "optim", "sharding", "engine"},
    "weights": _BASE | {"models", "data", "checkpoint"},
    "evaluation": _BASE | {"models", "methods", "data", "optim", "sharding", "engine", "checkpoint", "weights"},
    "reporting": _BASE
    | {"models", "methods", "data", "optim", "sharding", "engine", "planner", "checkpoint", "evaluation"},
    "launch": _BASE | {"sharding", "engine", "planner", "checkpoint", "evaluation", "reporting"},
    "commands": _BASE
    | {"vissl", "data", "engine", "planner", "checkpoint", "weights", "evaluation", "reporting", "launch"},
}


def imported_rooms(path: Path) -> set[str]:
    """First component after ``vissl_zero.`` of every import in a file, type-checking-only ones left out."""
    rooms: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vissl_zero":
            parts = node.module.split(".")[1:]
            rooms.update([parts[0]] if parts else [alias.name for alias in node.names])
        if isinstance(node, ast.Import):
            rooms.update(a.name.split(".")[1] for a in node.names if a.name.startswith("vissl_zero."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return rooms


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_room_imports_only_what_the_arrows_allow(room):
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        extra = imported_rooms(path) - ALLOWED[room] - ANYONE - {room}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {sorted(extra)}"


def module_imports() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports anywhere, in functions too; type-checking-only ones left out."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        guards = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        for_types = {id(inner) for guard in guards for inner in ast.walk(guard)}
        named: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and id(node) not in for_types:
                named |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= parts & files.keys() or {node.module}
        found[name] = named & files.keys() - {name}
    return found


def test_modules_do_not_import_each_other_in_a_circle():
    left = module_imports()
    while ends := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in ends}
    assert not left, f"in a circle, or above one: {sorted(left)}"


def test_every_folder_is_a_known_room():
    folders = {p.parent.name for p in PACKAGE.glob("*/__init__.py")} - {"conf"}
    assert folders == set(ALLOWED)


@pytest.mark.parametrize(
    "word", ["fully_shard", "FSDPModule", "DistributedDataParallel", "fairscale", "sharding.level"]
)
def test_nothing_outside_sharding_asks_for_the_engine(word):
    allowed = (
        "sharding/",
        "planner/",
        "config/",
        "resolve/",
        "vissl/",
        "commands/",
        "conf/",
        "registry.py",
        "cli.py",
        "reporting/",
    )
    allowed += ("checkpoint/foreign_state.py",)  # reads files that VISSL and fairscale wrote
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(allowed):
            assert word not in path.read_text(), f"{name} mentions {word}"


@pytest.mark.slow
def test_a_rank_that_trains_imports_no_planner():
    code = "import vissl_zero.launch.worker, sys; sys.exit(any('vissl_zero.planner' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("module", ["cli", "resolve.resolve", "registry", "launch.run"])  # ranks alone need it
def test_configuration_and_launcher_import_no_torch(module):
    code = f"import vissl_zero.{module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_rank_imports_nothing_before_its_first_step_that_it_may_never_need():
    slow = {"hydra", "matplotlib", "timm", "sklearn", "tensorboard"}
    modules = "vissl_zero.launch.worker, vissl_zero.models.trunks.regnet, vissl_zero.methods.swav"
    code = f"import {modules}, sys; sys.exit(' '.join({slow} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_walks_page_names_files_that_exist_and_stay_short():
    walks = (PACKAGE.parent / "docs" / "walks.md").read_text()
    rooms = PACKAGE, PACKAGE / "sharding"
    for name in re.findall(r"`([\w/]+\.py)`", walks):
        assert any((room / name).is_file() for room in rooms), name
    lengths = [table.count("\n| `") for table in re.split(r"\| files?[\w ]* \|", walks)[1:]]
    assert all(length <= most for length, most in zip(lengths, (12, 10, 5, 5, 9), strict=True)), lengths


def test_the_launchers_table_names_tests_and_tries_that_exist():
    table = (PACKAGE.parent / "docs" / "cluster.md").read_text().split("| property |")[1].split("\n\n")[0]
    tests = "".join(path.read_text() for path in (PACKAGE.parent / "tests").rglob("test_*.py"))
    tries = (PACKAGE.parent / "benchmarks" / "elastic_properties.py").read_text()
    named = re.findall(r"`(test_\w+)`", table), re.findall(r"(?:\| |\. )`(\w+)`: ", table)
    assert len(named[0]) >= 15 and len(named[1]) >= 10
    for words, text in zip(named, (tests, tries), strict=True):
        assert [word for word in words if f"def {word}(" not in text] == []
    for name in re.findall(r"`(\w+\.py)`", table):
        assert (PACKAGE / "launch" / name).is_file(), name


# Not in sharding/torch_private.py: modules that torch's own documentation sends people to, private by their path alone;
# base classes of layers, for which torch has no public name; and a name that stands in every file of torch.save.
PRIVATE_ELSEWHERE = (
    "torch._subclasses.fake_tensor.",
    "torch.utils._python_dispatch.",
    "torch.utils._pytree",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.conv._ConvNd",
    "nn.modules.batchnorm._BatchNorm",
    "torch._utils",
)
# Attributes of torch's objects in sharding/ that no accessor hides. fairscale's are the business of its own folder.
_OWN_PRIVATE = re.compile(r"\b(?:def|class) (_\w+)|\b(?:self|cls|type\(self\))\.(_\w+)|^ *(_\w+)(?::| =|, _)", re.M)


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def test_private_names_of_torch_are_in_one_file():
    for path in PACKAGE.rglob("*.py"):
        if path.name == "torch_private.py":
            continue
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            if isinstance(node, ast.Attribute) and _dotted(node).split(".")[0] in ("torch", "nn", "dist"):
                found.add(_dotted(node))
        extra = {name for name in found if _is_private(name) and not name.startswith(PRIVATE_ELSEWHERE)}
        assert not extra, f"{path.relative_to(PACKAGE)}: {sorted(extra)}"


def test_sharding_reads_no_private_attribute_of_torchs_objects():
    texts = {path: path.read_text() for path in (PACKAGE / "sharding").rglob("*.py")}
    own = {name for text in texts.values() for match in _OWN_PRIVATE.findall(text) for name in match if name}
    for path, text in texts.items():
        if path.name == "torch_private.py" or path.parent.name == "fairscale":
            continue
        read = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        extra = {name for name in read - own if name.startswith("_") and not name.startswith("__")}
        assert not extra, f"{path.relative_to(PACKAGE)}: {sorted(extra)}"
