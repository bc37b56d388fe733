"""How large the house is: code lines, files, functions, import circles. For us, and for any other checkout.

    python benchmarks/house_size.py vissl_zero
    python benchmarks/house_size.py ../torchtitan/torchtitan ../lightly/lightly     # the same figures for others
    python benchmarks/house_size.py vissl_zero --before ../older/vissl_zero         # what became of older functions

A function of the older checkout is found again where most of its lines are, at least half of them. What features have
added to it since counts too: the figure says how much larger the code of the same functions is, not why.

Code lines leave out blanks, comments and docstrings. An import circle is a set of modules that import each other while
they are imported; imports inside functions and under TYPE_CHECKING do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class House:
    """The figures of one package; lines are code lines."""

    files: int
    code_lines: int
    median_file: float
    p95_file: float
    p95_function: float
    annotated: float
    comments_per_100: float
    circles: list[list[str]]
    repeated_files: list[str]
    repeated_classes: list[str]


def measure(package: Path) -> House:
    """Measure every ``.py`` file below ``package``."""
    files, functions, annotated, comments = [], [], [], 0
    class_names: Counter[str] = Counter()
    file_names: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        lines = _code_lines(text, tree)
        comments += sum(token.type == tokenize.COMMENT for token in _tokens(text))
        if lines:
            files.append(len(lines))
        if path.name != "__init__.py":
            file_names[path.name] += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(len([n for n in lines if node.lineno <= n <= (node.end_lineno or node.lineno)]))
                annotated.append(_is_annotated(node))
        class_names.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return House(
        files=len(files),
        code_lines=sum(files),
        median_file=statistics.median(files),
        p95_file=_p95(files),
        p95_function=_p95(functions),
        annotated=sum(annotated) / max(len(annotated), 1),
        comments_per_100=100 * comments / sum(files),
        circles=_circles(package),
        repeated_files=sorted(name for name, count in file_names.items() if count > 1),
        repeated_classes=sorted(name for name, count in class_names.items() if count > 1),
    )


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                docstrings.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    lines: set[int] = set()
    for token in _tokens(text):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def _is_annotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    given = [a for a in arguments if a.arg not in ("self", "cls")]
    return all(a.annotation is not None for a in given) and (node.returns is not None or node.name == "__init__")


def _p95(values: list[int]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else float(values[0])


def _circles(package: Path) -> list[list[str]]:
    """Strongly connected modules of more than one, by Tarjan's algorithm."""
    root = package.parent
    modules = {_module(path, root): path for path in package.rglob("*.py")}
    graph = {name: sorted(_imports(path, name, modules) - {name}) for name, path in modules.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            position = stack.index(name)
            circle = stack[position:]
            del stack[position:]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, name: str, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports when it is imported itself."""
    found: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found & set(modules)


@dataclass(frozen=True)
class Since:
    """What became of older functions; all are code lines.

    Attributes:
        before: of the functions that were found again, then.
        now: of those in which they were found.
        gone: of the functions that were not.
    """

    before: int
    now: int
    gone: int


def since(older: Path, package: Path) -> Since:
    """Find the functions and methods of ``older`` again in ``package``."""
    present = functions_of(package)
    places: dict[str, set[int]] = {}
    for index, lines in enumerate(present):
        for line in set(lines):
            places.setdefault(line, set()).add(index)
    found: set[int] = set()
    before = gone = 0
    for lines in functions_of(older):
        shared = Counter(index for line in set(lines) for index in places.get(line, ()))
        best, number = shared.most_common(1)[0] if shared else (-1, 0)
        if 2 * number >= len(set(lines)):
            before += len(lines)
            found.add(best)
        else:
            gone += len(lines)
    return Since(before, sum(len(present[index]) for index in found), gone)


def functions_of(package: Path) -> list[list[str]]:
    """The code lines of each function and method, without indentation; inner functions belong to theirs."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        source, lines = text.splitlines(), _code_lines(text, tree)
        bodies = [tree.body]
        while bodies:
            for node in bodies.pop():
                if isinstance(node, ast.ClassDef):
                    bodies.append(node.body)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                    found.append([source[number - 1].strip() for number in own if number in lines])
    return found


def main() -> None:
    """Print one column per package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path, help="folders of Python packages")
    parser.add_argument("--before", type=Path, help="the first package in an older checkout")
    given = parser.parse_args()
    packages = given.packages
    for path in packages:
        if not any(path.rglob("*.py")):
            parser.error(f"{path}: holds no Python file. Name the folder of a package.")
    houses = {path.name: measure(path) for path in packages}
    rows = {
        "code lines": lambda h: f"{h.code_lines:,}",
        "files": lambda h: f"{h.files:,}",
        "median file": lambda h: f"{h.median_file:.0f}",
        "p95 file": lambda h: f"{h.p95_file:.0f}",
        "p95 function": lambda h: f"{h.p95_function:.0f}",
        "annotated": lambda h: f"{h.annotated:.0%}",
        "comments per 100 code lines": lambda h: f"{h.comments_per_100:.1f}",
        "import circles": lambda h: f"{len(h.circles)}",
        "file names used twice": lambda h: f"{len(h.repeated_files)}",
        "class names used twice": lambda h: f"{len(h.repeated_classes)}",
    }
    print(f"{'':30}" + "".join(f"{name:>16}" for name in houses))
    for title, value in rows.items():
        print(f"{title:30}" + "".join(f"{value(house):>16}" for house in houses.values()))
    if given.before:
        found = since(given.before, packages[0])
        print(
            f"functions of then: {found.before:,} code lines, found again with {found.now:,} "
            f"({found.now / found.before - 1:+.1%}); not found: {found.gone:,}"
        )
    for name, house in houses.items():
        for circle in house.circles:
            print(f"circle in {name}: {' <-> '.join(circle)}")
        for title, repeated in (("files", house.repeated_files), ("classes", house.repeated_classes)):
            if repeated:
                print(f"{title} twice in {name}: {', '.join(repeated)}")


if __name__ == "__main__":
    main()
