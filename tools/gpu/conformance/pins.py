"""Ties the inline PTX of csrc/device to the card that ran it: pins.json has a hash of each piece and a date.

    python tools/gpu/conformance/pins.py                 # compares; exit status 1 if a piece has changed since its run
    python tools/gpu/conformance/pins.py add             # writes down new pieces as not yet run on a card
    python tools/gpu/conformance/pins.py replay          # on a card: compares what it computes with golden.txt.xz
    python tools/gpu/conformance/pins.py record          # on a card: runs the conformance program, dates what it runs
    python tools/gpu/conformance/pins.py record --tests  # after tools/gpu/run.py has passed there: dates all pieces

The host never compiles a device body, so that no test without a card sees a wait that became too weak. A piece is a
statement with `asm`, or with a macro that makes one, together with its condition; what is left of such a function; a
macro. Comments and layout do not count. tests/test_conformance.py compares in CI: an edit needs a new run, whose dates
are committed with it.
"""

import argparse
import datetime
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import vectors

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
DEVICE = ROOT / "csrc" / "device"
PINS = FOLDER / "pins.json"
MAKES_ASM = re.compile(r"\basm\b|\bWARPSMITH_(?:LOAD|STORE|ADD|MMA|WGMMA\w*|FLOAT8\w*)\b")


@dataclass(frozen=True)
class Piece:
    file: str
    function: str
    text: str  # its beginning, for people
    hash: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.function, self.hash

    def __str__(self) -> str:
        return f"csrc/device/{self.file}: {self.function}: {self.text}"


def masked(text: str) -> str:
    """The same length, with the insides of string literals blank."""
    return re.sub(r'"(?:\\.|[^"\\])*"', lambda m: '"' + " " * (len(m[0]) - 2) + '"', text)


def device_side(text: str) -> str:
    """Without comments, and without what only the host compiles."""
    kept: list[str] = []
    taking: list[bool] = []
    for line in re.sub(r"//[^\n]*", "", text).splitlines():
        directive = line.strip()
        if directive.startswith("#if"):
            taking.append(not directive.startswith("#ifdef WARPSMITH_SIM"))
            ends_device = directive.startswith("#ifndef WARPSMITH_SIM")
        elif directive.startswith(("#else", "#elif")):
            taking[-1] = not (directive.startswith("#else") and ends_device)
        elif directive.startswith("#endif"):
            taking.pop()
        if all(taking) and not directive.startswith("#undef"):
            kept.append(line)
    return "\n".join(kept)


def macros_and_rest(text: str) -> tuple[list[str], str]:
    macro = re.compile(r"^[ \t]*#define\b(?:[^\n]*\\\n)*[^\n]*$", re.M)
    return macro.findall(text), macro.sub("", text)


def closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError("a brace is not closed")


def definitions(text: str) -> list[str]:
    """Functions and structs, in namespaces or not."""
    found, start, i, hidden = [], 0, 0, masked(text)
    while i < len(text):
        if hidden[i] == "{":
            if re.search(r"\bnamespace\b[^;{}]*$", hidden[start:i]):
                start = i + 1
            else:
                i = closing(hidden, i)
                found.append(text[start : i + 1])
                start = i + 1
        elif hidden[i] in ";}":
            start = i + 1
        i += 1
    return found


def statements(text: str) -> list[tuple[int, int]]:
    """Where those with asm are, each with the condition before it."""
    hidden = masked(text)
    found = []
    for match in MAKES_ASM.finditer(hidden):
        if found and match.start() < found[-1][1]:
            continue
        start = max(hidden.rfind(c, 0, match.start()) for c in ";{}") + 1
        end = hidden.index(";", match.start()) + 1
        found.append((start, end))
    return found


def function_name(text: str) -> str:
    """With the arguments of a specialisation: from_float<float16>."""
    head = re.sub(r"__\w+__(?:\(\([^)]*\)\))?|template\s*<[^>]*>", "", masked(text).split("{")[0])
    name = re.search(r"(\w+)\s*(<[^()]*>)?\s*\(", head)
    return name[1] + (name[2] or "") if name else " ".join(head.split())


def without_layout(text: str) -> str:
    """No whitespace outside string literals, and literals that follow each other as one."""
    parts = re.split(r'("(?:\\.|[^"\\])*")', text)
    bare = [p if i % 2 else re.sub(r"\\\n|\s", "", p) for i, p in enumerate(parts)]
    return "".join(bare).replace('""', "")


def piece(file: str, function: str, text: str) -> Piece:
    beginning = re.search(r'"([^"]*)"', text)
    shown = beginning[1] if beginning else " ".join(text.split())
    return Piece(file, function, shown[:40], hashlib.sha256(without_layout(text).encode()).hexdigest()[:16])


def pieces_of(name: str, text: str) -> list[Piece]:
    text = device_side(text)
    if "asm" not in text:
        return []
    macros, rest = macros_and_rest(text)
    found = [piece(name, m.split()[1].split("(")[0], m) for m in macros]
    for definition in definitions(rest):
        places = statements(definition)
        if not places:
            continue
        function = function_name(definition)
        found += [piece(name, function, definition[a:b]) for a, b in places]
        left = "".join(
            definition[b:a] for (_, b), (a, _) in zip([(0, 0), *places], [*places, (None, None)], strict=True)
        )
        found.append(piece(name, function, left))
    return found


def pieces() -> list[Piece]:
    """Each once: equal pieces of a function are one."""
    found = [
        p
        for f in sorted(DEVICE.glob("*.h"))
        if not f.name.startswith("host_")
        for p in pieces_of(f.name, f.read_text())
    ]
    return list({p.key: p for p in found}.values())


def load() -> dict[tuple[str, str, str], str]:
    """{key: the run, or "" before the first}"""
    if not PINS.exists():
        return {}
    return {(p["file"], p["function"], p["hash"]): p["run"] for p in json.loads(PINS.read_text())}


def save(dates: dict[tuple[str, str, str], str]) -> None:
    lines = [json.dumps({**asdict(p), "run": dates[p.key]}) for p in pieces() if p.key in dates]
    PINS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def changed() -> list[Piece]:
    """Pieces that are not written down: changed since their run, or new."""
    known = load()
    return [p for p in pieces() if p.key not in known]


def never_run() -> list[Piece]:
    known = load()
    return [p for p in pieces() if known.get(p.key) == ""]


def add() -> int:
    """Only for functions without a piece that is gone: a change of what a card has run needs a card."""
    known, now = load(), pieces()
    keys = {p.key for p in now}
    gone = {(file, function) for file, function, hash_ in known if (file, function, hash_) not in keys}
    refused = [p for p in changed() if (p.file, p.function) in gone]
    for p in refused:
        print(f"changed, needs a run on a card: {p}")
    save({p.key: known.get(p.key, "") for p in now if p.key in known or p not in refused})
    return bool(refused)


def reached(*sources: Path) -> set[str]:
    """Functions and macros of csrc/device that these sources use, directly or through others."""
    uses: dict[str, set[str]] = {}
    for header in DEVICE.glob("*.h"):
        macros, rest = macros_and_rest(device_side(header.read_text()))
        named = [(m.split()[1].split("(")[0], m) for m in macros]
        named += [(function_name(d).split("<")[0], d) for d in definitions(rest)]
        for name, text in named:
            uses.setdefault(name, set()).update(re.findall(r"\w+", text))
            for struct in re.findall(r"struct\s+(\w+)", text):  # which the macro defines
                uses.setdefault(struct, set()).add(name)
    new = set(re.findall(r"\w+", "".join(f.read_text() for f in sources))) & uses.keys()
    found = set(new)
    while new:
        new = set().union(*(uses[name] for name in new)) & uses.keys() - found
        found |= new
    return found


def ops() -> list[Path]:
    rooms = [ROOT / "csrc" / room for room in ("kernels", "tiles")]
    return [path for kind in ("*.cu*", "*.h") for room in rooms for path in sorted(room.rglob(kind))]


def program_for_card() -> Path:
    program = ROOT / "build" / "conformance"
    program.parent.mkdir(exist_ok=True)
    source = str(FOLDER / "conformance.cu")
    architecture = "-gencode=arch=compute_90a,code=sm_90a"
    subprocess.run(
        ["nvcc", "-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", architecture, source, "-o", str(program)], check=True
    )
    return program


def replay() -> int:
    """Whether this card computes what is written down."""
    return subprocess.run([str(program_for_card()), "check", str(vectors.unpacked(ROOT / "build"))]).returncode


def record(tests_passed: bool) -> int:
    program = program_for_card()
    golden = program.with_name("golden.txt")
    subprocess.run([str(program), "record", str(golden)], check=True)
    vectors.pack(golden.read_text())
    return cover(datetime.date.today().isoformat(), tests_passed)


def cover(date: str, tests_passed: bool) -> int:
    """Dates what the program reaches; after passed tests also what the ops do."""
    known, by_program = load(), reached(*FOLDER.glob("*.cu*"))
    by_tests = reached(*ops()) if tests_passed else set()
    for p in pieces():
        name = p.function.split("<")[0]
        if name in by_program:
            known[p.key] = date
        elif name in by_tests:
            known[p.key] = f"{date}, the ops' tests"
    save(known)
    for p in changed() + never_run():
        print(f"not run: {p}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["check", "add", "replay", "record"], default="check")
    parser.add_argument("--tests", action="store_true", help="the ops' tests have passed on this card with this source")
    arguments = parser.parse_args()
    if arguments.action == "add":
        return add()
    if arguments.action == "replay":
        return replay()
    if arguments.action == "record":
        return record(arguments.tests)
    for p in changed():
        print(f"changed since its run on a card: {p}")
    for p in never_run():
        print(f"not yet run on a card: {p}")
    return bool(changed())


if __name__ == "__main__":
    sys.exit(main())
