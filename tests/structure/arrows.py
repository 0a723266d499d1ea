"""The table of arrows: which room may include or import which."""

import ast
import json
import re

from files import CPP, files, read

# What each room of csrc may include, as the first part of the include's path; kernels and
# bindings have rules of their own below.
ROOMS = {
    "device": {"device", "common"},
    "common": {"common"},
    "libraries": {"libraries", "common"},
    "sim": {"sim", "device", "common", "kernels"},
    "tiles": {"tiles", "device", "common"},
    "kernels": {"tiles", "device", "common", "libraries", "kernels"},
    "cpu": {"cpu", "common", "kernels"},
    "bindings": {"bindings", "common", "libraries", "kernels"},
    "pymodule": {"pymodule", "common", "kernels"},
    "include": {"warpsmith"},
}
TORCH_HEADERS = r"^(torch|ATen|c10|caffe2)/"
STABLE_HEADERS = r"^torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/"
TEMPLATE_LIBRARIES = r"^(cutlass|cute|cub|thrust)/|^cooperative_groups"
CUDA_HEADERS = r"^cuda"
FOUND_AT_RUN_TIME = r"^(cublas|cudnn|nccl)|^dlfcn\.h$"


def include_violations(root):
    """Includes in csrc that go up or sideways, or leave the project for a library that the room must not know."""
    found = []
    for path in files(root, *CPP, under="csrc"):
        room = path.parts[1]
        if room not in ROOMS:
            found.append(f"{path}: {room} is not a room of csrc")
            continue
        for name in re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', read(root, path), re.MULTILINE):
            why = _refused(root, path, room, name)
            if why:
                found.append(f"{path}: includes {name}: {why}")
    return found


def _refused(root, path, room, name):
    if "lab" in name.split("/"):
        return "nothing uses lab"
    ours = name.split("/")[0] in ROOMS and (root / "csrc" / name).exists()
    if not ours:
        return _refused_outside(room, name)
    target = name.split("/")[0]
    if target not in ROOMS[room]:
        return f"{room} must not use {target}"
    if room == "bindings" and target == "bindings" and not name.startswith("bindings/support/"):
        return "bindings may use bindings/support alone"
    if target == "libraries" and room == "kernels" and path.suffix == ".cuh":
        return "device code must not use libraries"
    if target == "libraries" and room == "bindings" and path.parts[2] != "support":
        return "bindings may use libraries in bindings/support alone"
    if target != "kernels":
        return None
    if room == "kernels" and name.split("/")[1] != path.parts[2]:
        return "another family's folder"
    if room in ("cpu", "bindings") and not re.fullmatch(r"kernels/\w+/\w+\.h", name):
        return f"{room} may use an op's plain header alone"
    if room == "pymodule" and not name.endswith(".h"):
        return "pymodule may use config choosers alone"
    return None


def _refused_outside(room, name):
    if room == "include":
        return None
    if re.match(TORCH_HEADERS, name):
        if room != "bindings":
            return f"{room} must not use torch"
        return None if re.match(STABLE_HEADERS, name) else "only headers of the stable ABI"
    if re.match(TEMPLATE_LIBRARIES, name):
        return "kernels are our own: no CUTLASS, CUB or cooperative groups"
    if re.match(FOUND_AT_RUN_TIME, name) and room not in ("libraries", "sim"):  # sim asks for the names of kernels
        return "libraries are opened at run time by csrc/libraries alone"
    if re.match(CUDA_HEADERS, name) and room in ("cpu", "pymodule"):
        return f"{room} must not use the CUDA runtime"
    if name.startswith("pybind11/") and room != "pymodule":
        return "pybind11 belongs to pymodule"
    return None


# What a Python room must not import, by the first part below `warpsmith`. ops take their plain forms from reference.
PYTHON_ROOMS = {
    "_core": {"ops", "nn", "optim", "amp", "train", "distributed", "reference", "integrations", "testing", "cli"},
    "ops": {"nn", "optim", "amp", "train", "distributed", "integrations", "testing", "cli"},
    "nn": {"reference", "train", "distributed", "integrations", "testing", "cli"},
    "optim": {"nn", "reference", "train", "distributed", "integrations", "testing", "cli"},
    "amp": {"nn", "reference", "train", "distributed", "integrations", "testing", "cli"},
    "train": {"reference", "integrations", "testing", "cli"},
    "distributed": {"reference", "integrations", "testing", "cli"},
    "integrations": {"reference", "testing", "cli"},
}
USERS = ("tests", "benchmarks", "examples", "notebooks")


def import_violations(root, exceptions=()):
    """Python imports against the table, `torch.ops` above the ops, and private names used from outside the package."""
    found = []
    for path in files(root, ".py", under="python/warpsmith"):
        room = path.parts[2] if len(path.parts) > 3 else ""
        tree = ast.parse(read(root, path))
        for module in _imports(tree, path):
            parts = module.split(".")
            if parts[0] == "lab":
                found.append(f"{path}: imports {module}: nothing uses lab")
            if parts[0] != "warpsmith":
                continue
            target = parts[1] if len(parts) > 1 else ""
            if room == "reference" and target != "reference":
                found.append(f"{path}: imports {module}: a reference is torch alone")
            elif target in PYTHON_ROOMS.get(room, ()):
                found.append(f"{path}: imports {module}: {room} must not use {target}")
        if room in ("nn", "optim", "amp", "train") and _uses_torch_ops(tree):
            found.append(f"{path}: uses torch.ops: {room} is built on the public functions of ops")
    for folder in USERS:
        for path in files(root, ".py", ".ipynb", under=folder):
            if str(path) not in exceptions:
                found += [f"{path}: uses the private name {name}" for name in _private_names(_tree(root, path))]
    return found


def import_circles(root):
    """Modules of the package that import each other, be it for types alone or inside a function:
    "a imports b imports a". A package's __init__ does not count: its place is above its modules."""
    modules = {_module(path): path for path in files(root, ".py", under="python/warpsmith")}
    arrows = {}
    for name, path in modules.items():
        imported = _imports(ast.parse(read(root, path)), path)
        arrows[name] = {m for m in imported if m in modules and modules[m].name != "__init__.py"}
    found, done = [], set()

    def visit(name, way):
        if name in way:
            found.append(" imports ".join([*way[way.index(name) :], name]))
        elif name not in done:
            for target in sorted(arrows[name]):
                visit(target, [*way, name])
            done.add(name)

    for name, path in sorted(modules.items()):
        if path.name != "__init__.py":
            visit(name, [])
    return found


def _module(path):
    return ".".join(path.with_suffix("").parts[1:])


def _tree(root, path):
    text = read(root, path)
    if path.suffix == ".ipynb":
        cells = [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        lines = "\n".join("".join(source) for source in cells).splitlines()
        text = "\n".join("pass" if line.startswith(("%", "!")) else line for line in lines)
    return ast.parse(text)


def _imports(tree, path):
    package = [p for p in path.with_suffix("").parts[1:] if p != "__init__"]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            if module.split(".")[0] == "warpsmith":
                yield from (f"{module}.{alias.name}" for alias in node.names)


def _uses_torch_ops(tree):
    return any(
        isinstance(n, ast.Attribute) and n.attr == "ops" and isinstance(n.value, ast.Name) and n.value.id == "torch"
        for n in ast.walk(tree)
    )


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _private_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "warpsmith":
            parts = [*node.module.split("."), *(a.name for a in node.names)]
            yield from (f"{node.module}: {p}" for p in parts if _is_private(p))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "warpsmith":
                    yield from (alias.name for p in alias.name.split(".") if _is_private(p))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id == "warpsmith":
                yield f"warpsmith...{node.attr}"
