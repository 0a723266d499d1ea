"""The project's files, and their text without comments."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Neither sources nor documents: builds, environments, caches, and what runs leave behind.
SKIPPED = {"build", "dist", "runs", "_build", "node_modules", "__pycache__"}
CODE = (".py", ".pyi", ".h", ".cuh", ".cu", ".cpp", ".cmake", ".sh")
CPP = (".h", ".cuh", ".cu", ".cpp")
DOCUMENTS = (".md", ".rst")


def files(root, *suffixes, under=""):
    """Files below ``root/under`` with one of the suffixes, as paths relative to ``root``, sorted."""
    found = []
    for folder, inner, names in os.walk(root / under):
        inner[:] = [name for name in inner if not _is_hidden(name)]  # an environment has more files than the project
        here = Path(folder).relative_to(root)
        found += [here / name for name in names if Path(name).suffix in suffixes and not _is_hidden(name)]
    return sorted(found)


def _is_hidden(name):
    return (name.startswith(".") and name != ".ci") or name in SKIPPED or name.endswith(".egg-info")


def read(root, path):
    return (root / path).read_text(encoding="utf-8")


def code_of(text):
    """C++ text whose comments and string contents are blanked, line by line, so that positions stay."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)

    def blank(match):
        return re.sub(r"[^\n]", " ", match.group())

    return pattern.sub(blank, text)


def lines_matching(text, pattern):
    """1-based numbers of the lines in which a pattern occurs."""
    return [number for number, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)]
