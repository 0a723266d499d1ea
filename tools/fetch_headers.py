"""Fetches the headers of libraries that are opened at run time, for builds without them beside torch: CI and wheels.

    python tools/fetch_headers.py build/headers          # then WARPSMITH_CUBLAS_INCLUDE=build/headers/nvidia-cublas

They come out of NVIDIA's own wheels, by pip, without what those depend on (docs/installation.md).
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

WHEELS = {"nvidia-cublas": "13.1.0.3"}  # what torch 2.11 for CUDA 13 pins: the oldest that a build must know
PLATFORM = ("--only-binary=:all:", "--platform=manylinux_2_27_x86_64", "--python-version=3.11")


def fetch(name: str, version: str, into: Path) -> Path:
    """A folder with the headers of a wheel, fetched unless it is there."""
    folder = into / name
    stamp = folder / ".version"
    if stamp.exists() and stamp.read_text() == version:
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *PLATFORM, "-d", scratch]
        subprocess.run([*command, f"{name}=={version}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                path = PurePosixPath(entry)
                if path.parent.name == "include" and path.suffix == ".h":
                    (folder / path.name).write_bytes(archive.read(entry))
    stamp.write_text(version)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, help="a folder, with one in it for each wheel")
    arguments = parser.parse_args()
    for name, version in WHEELS.items():
        print(fetch(name, version, arguments.into))
    return 0


if __name__ == "__main__":
    sys.exit(main())
