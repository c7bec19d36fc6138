"""The layout's rules, read from the source: imports, torch, the environment, lengths and names."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax_ssd", "bridge")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")

# What each module (or folder, ending in /) may import from jax_ssd; "jax_ssd" stands for its public names.
# Data flows api -> validate -> dispatch -> implementations -> kernels.
LEAVES = {"problem", "settings", "philox", "seeds"}
ARRAY_CODE = {"slots", "discretize", "varying", "replay", "replay_ops"}
MAY_IMPORT = {
    "problem": set(),
    "settings": {"problem"},
    "philox": set(),
    "seeds": {"philox"},
    "varying": set(),
    "discretize": {"problem"},
    "slots": {"problem", "philox"},
    "checks": {"problem"},
    "replay": {"problem", "checks"},
    "replay_ops": {"problem", "slots", "replay"},
    "reference": {"problem"},  # shares no arithmetic with what it judges
    "kernels/": {"kernels/"},
    "implementations/": LEAVES | ARRAY_CODE | {"implementations/", "kernels/"},
    "dispatch": LEAVES | {"implementations/"},
    "validate": LEAVES | {"checks", "replay"},
    "api": LEAVES | ARRAY_CODE | {"checks", "validate", "dispatch"},
    "parallel": LEAVES | ARRAY_CODE | {"api"},
    "__init__": LEAVES | {"replay", "api", "parallel", "implementations/"},
    "models/": {"jax_ssd", "models/"},
    "demo": {"jax_ssd", "models/"},
    "cli": {"jax_ssd", "demo"},
    "__main__": {"cli"},
}
TORCH_IMPORTERS = ("bridge/", "jax_ssd/implementations/flashinfer.py", "tests/", "benchmarks/", "examples/")
ENVIRONMENT_READERS = ("jax_ssd/settings.py", "tests/", "benchmarks/")

FILE_LINES = 500
HOST_LINES = 50
KERNEL_LINES = 120
COMMENT_LINES = 3
LONG_FILES = {}  # path: why it is longer
LONG_FUNCTIONS = {}  # path::name: why it is longer


class Source(NamedTuple):
    """A Python file of the project."""

    path: str
    text: str
    tree: ast.Module


@cache
def sources():
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    texts = [(file.relative_to(ROOT).as_posix(), file.read_text()) for file in files]
    return [Source(path, text, ast.parse(text)) for path, text in texts]


def of_package(name):
    return [source for source in sources() if source.path.startswith(f"{name}/")]


def imported(source):
    """Full names that a file imports, at any depth; `from a import b` gives a.b, made absolute."""
    package = source.path.removesuffix(".py").split("/")[:-1]
    names = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def part(name):
    """The key of MAY_IMPORT for a full name inside jax_ssd: a module, a folder or the package itself."""
    first = name.split(".")[1] if "." in name else ""
    if (ROOT / "jax_ssd" / first).is_dir() and first:
        return f"{first}/"
    return first if (ROOT / "jax_ssd" / f"{first}.py").is_file() else "jax_ssd"


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(node):
    """Lines of a function without its docstring."""
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= first.end_lineno - first.lineno + 1
    return lines


def comment_runs(text):
    """(line, length) of each run of lines that hold nothing but a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    starts = sorted(line for line in comments if line - 1 not in comments)
    return [(line, next(n for n in range(1, len(comments) + 1) if line + n not in comments)) for line in starts]


def test_the_files_are_found():
    assert {"jax_ssd/api.py", "jax_ssd/problem.py", "tests/test_layout.py"} <= {source.path for source in sources()}


def test_imports_go_one_way():
    wrong = []
    for source in of_package("jax_ssd"):
        here = part(source.path.removesuffix(".py").replace("/", "."))
        here = "__init__" if source.path == "jax_ssd/__init__.py" else here
        assert here in MAY_IMPORT, f"{source.path}: say in MAY_IMPORT what it may import"
        used = {part(name) for name in imported(source) if name.split(".")[0] == "jax_ssd"}
        wrong += [f"{source.path} imports {name}" for name in sorted(used - MAY_IMPORT[here])]
    assert wrong == []


def test_jax_ssd_never_imports_bridge():
    assert [s.path for s in of_package("jax_ssd") if any(name.split(".")[0] == "bridge" for name in imported(s))] == []


def test_torch_is_imported_in_the_bridge_only():
    users = [s.path for s in sources() if any(name.split(".")[0] == "torch" for name in imported(s))]
    assert [path for path in users if not path.startswith(TORCH_IMPORTERS)] == []


def test_kernels_hold_kernels_only():
    banned = {"jax", "torch", "os"}
    kernels = [source for source in sources() if source.path.startswith("jax_ssd/kernels/triton/")]
    assert [s.path for s in kernels if banned & {name.split(".")[0] for name in imported(s)}] == []


def test_environment_is_read_in_settings_only():
    reads = re.compile(r"\bos\.(environ|getenv|putenv)\b|from os import")
    users = [source.path for source in sources() if reads.search(source.text)]
    assert [path for path in users if not path.startswith(ENVIRONMENT_READERS)] == []


def test_every_folder_of_modules_is_a_package():
    folders = {(ROOT / source.path).parent for name in PACKAGES for source in of_package(name)}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_files_are_short():
    lengths = {source.path: source.text.count("\n") for source in sources()}
    assert {path: n for path, n in lengths.items() if n > FILE_LINES and path not in LONG_FILES} == {}


def test_functions_are_short():
    long = {}
    for source in sources():
        limit = KERNEL_LINES if source.path.startswith("jax_ssd/kernels/") else HOST_LINES
        names = {f"{source.path}::{node.name}": body_lines(node) for node in functions(source.tree)}
        long |= {name: n for name, n in names.items() if n > limit and name not in LONG_FUNCTIONS}
    assert long == {}


def test_exceptions_still_exist():
    names = {f"{source.path}::{node.name}" for source in sources() for node in functions(source.tree)}
    assert set(LONG_FILES) <= {source.path for source in sources()}
    assert set(LONG_FUNCTIONS) <= names


def test_comments_are_short():
    runs = [(s.path, line, n) for s in sources() for line, n in comment_runs(s.text)]
    assert [run for run in runs if run[2] > COMMENT_LINES] == []


def test_names_do_not_carry_history():
    history = re.compile(r"_(old|new|v\d+|unstable|deprecated)$", re.IGNORECASE)
    defined = [
        f"{source.path}::{node.name}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    files = [source.path.removesuffix(".py") for source in sources()]
    assert [name for name in defined + files if history.search(name)] == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_nothing_is_left_to_do(word):
    assert [source.path for source in sources() if re.search(rf"\b{word}\b", source.text)] == []


def test_a_fault_would_be_seen():
    imports = "from . import checks\nimport torch.nn\n\n"
    text = imports + "def f():\n    '''one\n    two'''\n    # a\n    # b\n    return 1\n"
    source = Source("jax_ssd/made_up.py", text, ast.parse(text))
    assert imported(source) == ["jax_ssd.checks", "torch.nn"]
    assert part("jax_ssd.checks") == "checks"
    assert part("jax_ssd.implementations.xla") == "implementations/"
    assert part("jax_ssd.chunk_scan") == "jax_ssd"
    assert body_lines(functions(source.tree)[0]) == 4
    assert comment_runs(text) == [(7, 2)]
