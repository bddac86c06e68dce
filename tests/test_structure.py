"""What the tree promises as a whole: who may import whom, what stays free of torch, what the documents say of it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashflow.config import load_config
from flashflow.config.reference import reference
from flashflow.launch.options import imagined_hosts
from flashflow.launch.plan import plan

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flashflow"

LADDER = (
    {"errors", "records", "clock", "shapes", "folders"},
    {"algorithms.settings", "algorithms.catalogue", "algorithms.options", "algorithms.presets", "config", "messages"},
    {"topology", "ledger", "journal", "admission", "staleness", "packing", "metrics", "algorithms", "trainers.base"},
    {"transport"},
    {
        "data",
        "environments",
        "rewards",
        "engines",
        "trainers",
        "models",
        "tokenizers",
        "observe",
        "quickstart",
        "builtin",
        "evaluation",
        "simulate",
    },
    {"roles"},
    {"launch", "cli", "__main__", "simulate.run", "simulate.planner", "simulate.table"},
)
"""From low to high: a module imports from its own rung and from lower ones. Its rung is that of its longest prefix.

`trainers.base` stands low because it is only the interface, which the RPC of the gang carries."""

TORCH_FREE = (
    "flashflow", "flashflow.config", "flashflow.messages", "flashflow.ledger.ledger", "flashflow.topology",
    "flashflow.transport.in_process", "flashflow.transport.zeromq", "flashflow.data.stream",
    "flashflow.environments.single_turn", "flashflow.rewards.pool", "flashflow.roles.env", "flashflow.roles.buffer",
    "flashflow.roles.reward", "flashflow.observe.metrics", "flashflow.observe.progress", "flashflow.launch.run",
    "flashflow.launch.supervise", "flashflow.launch.slot", "flashflow.launch.check", "flashflow.launch.evaluate",
    "flashflow.launch.export",
    "flashflow.builtin.smollm2", "flashflow.cli", "flashflow.engines.simulated", "flashflow.trainers.simulated",
    "flashflow.simulate.episodes", "flashflow.simulate.reward", "flashflow.launch.in_process",
)  # fmt: skip


def module_name(path):
    """`a.b` for flashflow/a/b.py and for flashflow/a/b/__init__.py; '' for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def rung(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for height, names in enumerate(LADDER):
            if prefix in names:
                return height
    return None


def imports(path):
    """Modules of flashflow that a file imports, also inside functions; not those for annotations only."""
    pending = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        match node:
            case ast.Import(names=names):
                yield from (
                    alias.name.removeprefix("flashflow.") for alias in names if alias.name.startswith("flashflow.")
                )
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "flashflow":
                base = module.removeprefix("flashflow").lstrip(".")
                for alias in names:
                    inner = f"{base}.{alias.name}".lstrip(".")
                    yield inner if inner in MODULES else base


def test_every_module_stands_on_a_rung_of_the_ladder():
    assert [name for name in MODULES if name and rung(name) is None] == []


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_a_module_imports_from_its_own_rung_or_lower(name):
    upwards = [target for target in imports(MODULES[name]) if target and rung(target) > rung(name)]
    assert upwards == []


def test_roles_that_touch_no_tensor_import_no_torch():
    code = "\n".join([
        "import importlib, sys",
        f"for name in {TORCH_FREE!r}:",
        "    importlib.import_module(name)",
        "    assert 'torch' not in sys.modules, name",
    ])  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_every_module_says_what_it_is_in_its_first_line():
    silent = [
        name
        for name, path in MODULES.items()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_test_files_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path):
    load_config(path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_fits_the_machine_it_names(path):
    (line,) = re.findall(r"^#     flashflow check (\S+) --hosts (\S+) --devices (\S+)$", path.read_text(), re.MULTILINE)
    assert line[0] == f"configs/{path.name}"
    plan(load_config(path), imagined_hosts(*line[1:]))


def test_the_synchronous_quickstart_differs_in_scheduling_only():
    asynchronous, synchronous = (load_config(ROOT / "configs" / f"quickstart{name}.yaml") for name in ("", "_sync"))
    changes = {
        "run": {"name": "quickstart-sync"},
        "rollout": {"alpha": 0.0},
        "weights": {"sync": "blocking"},
    }
    changed = {name: getattr(asynchronous, name).model_copy(update=fields) for name, fields in changes.items()}
    assert asynchronous.model_copy(update=changed) == synchronous


def test_the_config_reference_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "run `make docs`"


def readme_tree():
    """Paths of the README's file tree, a folder ending in a slash."""
    block = re.search(r"^```text\n(flashflow/\n.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    folders, paths = [], []
    for line in block.group(1).splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def test_every_path_of_the_readmes_tree_exists():
    assert [path for path in readme_tree() if not (ROOT / path).exists()] == []


def test_the_readmes_tree_has_every_package_and_every_module_beside_them():
    packages = {f"flashflow/{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {f"flashflow/{path.name}" for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert (packages | modules) - set(readme_tree()) == set()


def test_the_dockerfile_copies_what_exists_and_makes_what_the_makefile_makes():
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {"flashflow", "launch", "pyproject.toml", "requirements.lock"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    torch = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"ARG TORCH={torch.group(1)}" in lines
    words = {line.split()[0] for line in lines if line and line[0].isalpha()}
    assert words <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}


def test_the_readme_opens_with_the_two_commands():
    block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [line.split("#")[0].strip() for line in block.group(1).splitlines()] == ["make quickstart", "make test"]
