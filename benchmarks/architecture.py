"""Print the figures of the table in docs/architecture.md: ``python benchmarks/architecture.py [PACKAGE]``.

Lines and functions are those of Python's files. An import counts wherever it stands, in functions too, unless it is for
type checkers alone. A public name is a function or class of a module without a leading underscore; where a module has
``__all__``, it is a name that stands there.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that type checkers alone see."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from nodes_at_run_time(child)


def is_tiny(function: Function) -> bool:
    """Check for a body of at most three lines, its docstring left out; decorated and special methods do not count."""
    body = function.body[ast.get_docstring(function) is not None :]
    num_lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
    return num_lines <= 3 and not function.decorator_list and not function.name.startswith("__")


def length(function: Function) -> int:
    """Count the lines of a function, its docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def public_names(tree: ast.Module) -> int:
    """Count the public functions and classes of a module."""
    listed = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    if listed:
        return len(ast.literal_eval(listed[0].value))
    names = [node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    return sum(not name.startswith("_") for name in names)


def imports(tree: ast.AST, modules: set[str]) -> set[str]:
    """Return the modules of ours that a module imports anywhere."""
    found: set[str] = set()
    for node in nodes_at_run_time(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & modules or {node.module}
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[int]:
    """Count the modules of each group that import each other, the largest group first."""
    reached = {name: {name} for name in graph}
    while True:
        wider = {name: set().union(seen, *(graph[other] for other in seen)) for name, seen in reached.items()}
        if wider == reached:
            break
        reached = wider
    groups = {frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items()}
    return sorted((len(group) for group in groups if len(group) > 1), reverse=True)


def main(package: Path) -> None:
    """Print one figure a line."""
    paths = sorted(package.rglob("*.py"))
    texts = {".".join(p.relative_to(package.parent).with_suffix("").parts): p.read_text() for p in paths}
    texts = {name.removesuffix(".__init__"): text for name, text in texts.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    num_lines = sum(len(text.splitlines()) for text in texts.values())
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    tokens = (token for text in texts.values() for token in tokenize.generate_tokens(io.StringIO(text).readline))
    num_comments = sum(token.type == tokenize.COMMENT for token in tokens)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "D401", "--output-format", "concise"]
    verdicts = subprocess.run([*command, str(package)], capture_output=True, text=True, check=False).stdout
    rows = {
        "files": len(paths),
        "lines": num_lines,
        "functions": len(functions),
        "functions per 1,000 lines": round(1000 * len(functions) / num_lines),
        "functions of at most 3 lines": sum(map(is_tiny, functions)),
        "lines of a function, 95 % have at most": round(statistics.quantiles(map(length, functions), n=20)[-1]),
        "public names per 1,000 lines": round(1000 * sum(map(public_names, trees.values())) / num_lines, 1),
        "comments per 100 lines": round(100 * num_comments / num_lines, 1),
        "docstrings without an imperative (D401)": verdicts.count(" D401 "),
        "circles of imports": circles({name: imports(tree, set(trees)) - {name} for name, tree in trees.items()}) or 0,
    }
    for name, figure in rows.items():
        print(f"{name:42}{figure}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "vissl_zero"))
