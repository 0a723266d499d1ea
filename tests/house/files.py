"""The project's files, and their text without comments."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Neither sources nor documents: builds, environments, caches, and what runs leave behind.
SKIPPED = {"build", "dist", "runs", "results", "_build", "node_modules", "__pycache__"}
CODE = (".py", ".pyi", ".h", ".cuh", ".cu", ".cpp", ".cmake", ".sh")
CPP = (".h", ".cuh", ".cu", ".cpp")
DOCUMENTS = (".md", ".rst")


def files(root, *suffixes, under=""):
    """Files below ``root/under`` with one of the suffixes, as paths relative to ``root``, sorted."""
    found = []
    for path in sorted((root / under).rglob("*")):
        parts = path.relative_to(root).parts
        hidden = any((p.startswith(".") and p != ".ci") or p in SKIPPED or p.endswith(".egg-info") for p in parts)
        if not hidden and path.suffix in suffixes and path.is_file():
            found.append(path.relative_to(root))
    return found


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
