"""Who may import whom, held by reading the source."""

import ast
from pathlib import Path

import m3d
from m3d.methods import METHODS

ROOT = Path(m3d.__file__).parent
LOW = {
    "m3d.errors",
    "m3d.limits",
    "m3d.lock",
    "m3d.own_kernels",
    "m3d.version",
    "m3d.registry",
    "m3d.types",
    "m3d.rng",
    "m3d.wording",
    "m3d.costs",
    "m3d.earlier",
}

# What a module (or package) may import of m3d, besides itself and LOW. Not listed: no rule.
ALLOWED = {
    "m3d.errors": set(),
    "m3d.limits": set(),
    "m3d.lock": set(),
    "m3d.own_kernels": set(),
    "m3d.version": set(),
    "m3d.wording": set(),
    "m3d.costs": set(),
    "m3d.earlier": set(),
    "m3d.registry": {"m3d.errors"},
    "m3d.types": set(),
    "m3d.rng": set(),
    "m3d.files": set(),
    "m3d.normalise": set(),
    "m3d.fused_mmd": set(),
    "m3d.kernels": {"m3d.fused_mmd"},
    "m3d.fused_augment": set(),
    "m3d.augment": {"m3d.fused_augment"},
    "m3d.rehearsal": {"m3d.augment", "m3d.nets"},
    "m3d.upsamplers": set(),
    "m3d.layouts": set(),
    "m3d.tiles": {"m3d.layouts", "m3d.upsamplers"},
    "m3d.synth": {"m3d.normalise", "m3d.tiles"},
    "m3d.players": set(),
    "m3d.runtime": set(),
    "m3d.shards": {"m3d.runtime"},
    "m3d.photo": set(),
    "m3d.data": {"m3d.decode", "m3d.files", "m3d.normalise"},
    "m3d.decode": set(),
    "m3d.nets": set(),
    "m3d.objectives": {"m3d.kernels", "m3d.players"},
    "m3d.trained": {
        "m3d.augment", "m3d.batches", "m3d.data", "m3d.files", "m3d.nets", "m3d.runtime", "m3d.shards", "m3d.train",
    },
    "m3d.select": {"m3d.data", "m3d.runtime", "m3d.shards", "m3d.trained"},
    "m3d.terminal": {"m3d.watch"},
    "m3d.probes": {"m3d.nets"},
    "m3d.guides": {"m3d.nets"},
    "m3d.unroll": {"m3d.augment", "m3d.nets", "m3d.players"},
    "m3d.pools": {
        "m3d.augment", "m3d.batches", "m3d.data", "m3d.files", "m3d.nets", "m3d.runtime", "m3d.shards", "m3d.synth",
        "m3d.train", "m3d.trained", "m3d.unroll",
    },
    "m3d.batches": {"m3d.augment", "m3d.normalise", "m3d.photo", "m3d.runtime"},
    "m3d.train": {"m3d.augment", "m3d.batches", "m3d.nets", "m3d.photo", "m3d.runtime"},
    "m3d.run_folder": {"m3d.files"},
    "m3d.condensed": {"m3d.files", "m3d.normalise", "m3d.run_folder", "m3d.tiles"},
    "m3d.watch": {"m3d.run_folder"},
    "m3d.course": set(),
    "m3d.pictures": {"m3d.condensed", "m3d.files", "m3d.run_folder", "m3d.tiles"},
    "m3d.report": {"m3d.condensed", "m3d.evaluation", "m3d.run_folder"},
    "m3d.export": {"m3d.condensed", "m3d.files"},
    "m3d.evaluation": {
        "m3d.augment", "m3d.batches", "m3d.condensed", "m3d.data", "m3d.files", "m3d.nets", "m3d.photo",
        "m3d.run_folder", "m3d.runtime", "m3d.saver", "m3d.train",
    },
    "m3d.teachers": {"m3d.condensed", "m3d.data", "m3d.nets", "m3d.runtime", "m3d.trained"},
    "m3d.ranking": {
        "m3d.augment", "m3d.condensed", "m3d.data", "m3d.evaluation", "m3d.files", "m3d.run_folder", "m3d.runtime",
        "m3d.select", "m3d.teachers",
    },
    "m3d.saver": {"m3d.files", "m3d.run_folder", "m3d.train"},
    "m3d.method": {
        "m3d.augment", "m3d.guides", "m3d.nets", "m3d.objectives", "m3d.players", "m3d.pools", "m3d.probes",
        "m3d.select", "m3d.tiles",
    },
    "m3d.step": {
        "m3d.augment", "m3d.data", "m3d.method", "m3d.nets", "m3d.players", "m3d.pools", "m3d.rehearsal", "m3d.runtime",
        "m3d.shards", "m3d.synth",
    },
    "m3d.grid": {
        "m3d.api", "m3d.condensed", "m3d.data", "m3d.evaluation", "m3d.files", "m3d.run_folder", "m3d.runtime",
        "m3d.teachers", "m3d.terminal", "m3d.watch",
    },
    "m3d.engine": {
        "m3d.course", "m3d.data", "m3d.method", "m3d.nets", "m3d.run_folder", "m3d.runtime", "m3d.shards", "m3d.step",
        "m3d.watch",
    },
}  # fmt: skip
USE_METHODS = {"m3d", "m3d.listing", "m3d.methods", "m3d.prepare"}


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("m3d"):
            names |= {f"m3d.{a.name}" for a in node.names} if node.module == "m3d" else {node.module or ""}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names if a.name.startswith("m3d")}
    return names


def top(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_the_dependency_rules_hold():
    checked = 0
    for name, path in modules().items():
        used = {top(i) for i in imports(path)} - {top(name)} - LOW
        if top(name) in ALLOWED:
            checked += 1
            assert used <= ALLOWED[top(name)], f"{name} may not import {sorted(used - ALLOWED[top(name)])}"
        if top(name) not in USE_METHODS:
            assert "m3d.methods" not in used, f"{name} may not import m3d.methods"
        assert "m3d.cli" not in used or name == "m3d.__main__", f"{name} may not import the command line"
    assert checked >= 39


# What the engine may know of the parts: their protocols, and what a method's record reads where it says nothing.
PROTOCOLS = {"Guide", "Init", "Kernel", "LivePlayer", "LivePool", "Objective", "Player", "Pool", "Probe", "World"}
DEFAULTS = {"method.py": {"Forward"}, "prepare.py": {"Task"}}  # and whoever builds a method tells it the task
PARTS = ("kernels", "objectives", "pools", "players", "guides", "probes", "unroll", "select", "methods")


def test_the_engine_names_no_method_and_no_concrete_part():
    concrete = {
        node.name
        for name, path in modules().items()
        if top(name).removeprefix("m3d.") in PARTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    } - PROTOCOLS
    assert {"MMD", "Fresh", "Descent", "RandomReal", "Gradient", "Unroll"} <= concrete and len(concrete) > 40
    assert len(METHODS.names()) == 18
    for name in ("engine.py", "step.py", "method.py", "prepare.py", "course.py", "watch.py"):
        words: set[str] = set()
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            words |= {str(getattr(node, field)) for field in ("id", "attr", "name", "value") if hasattr(node, field)}
        named = words & (concrete | set(METHODS.names())) - DEFAULTS.get(name, set())
        assert not named, f"{name} names {sorted(named)}"


def test_nothing_unpickles():
    """pickle appears only in the restricted reader, torch.load and numpy's allow_pickle=True nowhere."""
    for name, path in modules().items():
        text = path.read_text()
        assert "torch.load(" not in text.replace("``torch.load(", ""), name
        assert "allow_pickle=True" not in text, name
        if "import pickle" in text:
            assert name == "m3d.data.readers"
