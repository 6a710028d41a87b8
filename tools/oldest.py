"""Run the test suite with the oldest release that pyproject.toml allows of every dependency.

``python tools/oldest.py`` makes a virtual environment in ``.oldest``, installs the package there with
every requirement of the package and of its extra ``test`` at its floor, and runs pytest; arguments
after ``--`` go to pytest. ``python tools/oldest.py --print`` only prints the constraints.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("test",)


def floors(project: dict[str, object]) -> dict[str, str]:
    """Return the floor of every requirement, by name.

    Raises
    ------
    ValueError
        If a requirement has no floor, and so no oldest release.
    """
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    found: dict[str, str] = {}
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement.replace(" ", ""))
        if match is None:
            raise ValueError(f"{requirement!r} is not of the form name>=floor.")
        name, floor = match.groups()
        if found.setdefault(name, floor) != floor:
            raise ValueError(f"{name} has two floors: {found[name]} and {floor}.")
    return found


def main() -> int:
    """Build the environment and run the suite; return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the constraints and stop")
    parser.add_argument("--into", type=Path, default=ROOT / ".oldest", help="folder of the environment")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = "".join(f"{name}=={floor}\n" for name, floor in floors(project).items())
    if options.print:
        print(pinned, end="")
        return 0
    folder = options.into.resolve()
    venv.create(folder, clear=True, with_pip=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(pinned)
    python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    target = f"{ROOT}[{','.join(EXTRAS)}]"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", str(constraints), "-e", target], check=True)
    return subprocess.run([python, "-m", "pytest", *options.pytest], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
