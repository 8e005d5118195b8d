"""Which Julia, and by which rule. Nothing here starts a Julia for good or downloads one.

The rules, first match wins:

1. juliacall's own variables, ``PYTHON_JULIACALL_EXE`` and ``PYTHON_JULIACALL_PROJECT`` (or the
   same as ``-X juliacall-exe=``): both, or neither;
2. what ``pybridge setup`` recorded in the user's configuration folder;
3. the environment that juliapkg keeps for this Python, if our packages are in it;
4. ``julia`` on PATH with the project in ``JULIA_PROJECT``, if our packages are in it.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import platformdirs

from pybridge.julia.errors import JuliaNotFoundError

OLDEST = (1, 10)
#: What a project must hold for the Julia engine to work.
NEEDED = ("NestedGradients", "PythonCall", "Zygote")

_CHOICES = (
    "Choose one:\n"
    "  pybridge setup                               download a Julia and the packages (juliapkg)\n"
    "  pybridge setup --julia EXE --project DIR     use a Julia of yours\n"
    "  PYTHON_JULIACALL_EXE=EXE PYTHON_JULIACALL_PROJECT=DIR   the same, for one process\n"
    "Nothing is downloaded unless you ask. The JAX engine needs no Julia."
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A Julia that can be started: executable, project, and the rule that chose them."""

    exe: str
    project: str
    rule: str
    version: str
    lib: str
    bindir: str


def config_file() -> Path:
    """Where ``pybridge setup`` records its choice."""
    return Path(platformdirs.user_config_dir("pybridge")) / "julia.json"


def find() -> Found:
    """The Julia to use.

    Raises:
      JuliaNotFoundError: there is none, it is older than 1.10, or its project lacks our packages.
    """
    missed = []
    for rule in (_from_environment, _from_config, _from_juliapkg, _from_path):
        choice = rule()
        if isinstance(choice, str):
            missed.append(choice)
            continue
        exe, project, name = choice
        version, lib, bindir = probe(exe)
        if older(version):
            raise JuliaNotFoundError(
                f"Julia {version} at {exe} (by {name}) is too old: pybridge needs Julia "
                f"{OLDEST[0]}.{OLDEST[1]} or newer.\n{_CHOICES}"
            )
        return Found(exe, project, name, version, lib, bindir)
    tried = "\n".join(f"  - {reason}" for reason in missed)
    raise JuliaNotFoundError(
        f"no Julia for the Julia engine.\nLooked at:\n{tried}\n{_CHOICES}", missed
    )


def older(version: str) -> bool:
    """Whether a version such as "1.9.4" or "1.12.0-rc1" is older than what pybridge needs."""
    return tuple(map(int, version.split("-")[0].split(".")[:2])) < OLDEST


def option(name: str) -> str | None:
    """An option of juliacall's, in its own order: the command line's -X before the environment."""
    variable = f"PYTHON_JULIACALL_{name.upper().replace('-', '_')}"
    return sys._xoptions.get(f"juliacall-{name}") or os.environ.get(variable)


def threads() -> str:
    """How many threads Julia starts with: juliacall's option, JULIA_NUM_THREADS, and two at least.

    The first thread is Python's. A task that Julia code spawns needs another, or it waits for ever
    when XLA's thread waits for it.
    """
    asked = os.environ.get("JULIA_NUM_THREADS", "")
    return option("threads") or ("2" if asked in ("", "0", "1") else asked)


def _from_environment():
    exe, project = option("exe"), option("project")
    if not exe and not project:
        return "PYTHON_JULIACALL_EXE and PYTHON_JULIACALL_PROJECT: not set"
    if not (exe and project):
        have, lack = ("EXE", "PROJECT") if exe else ("PROJECT", "EXE")
        raise JuliaNotFoundError(
            f"PYTHON_JULIACALL_{have} is set and PYTHON_JULIACALL_{lack} is not: set both, or "
            "neither."
        )
    return _checked(exe, project, "PYTHON_JULIACALL_EXE and PYTHON_JULIACALL_PROJECT")


def _from_config():
    path = config_file()
    try:
        recorded = json.loads(path.read_text())
        exe, project = recorded["exe"], recorded["project"]
    except FileNotFoundError:
        return f"{path}: not there (`pybridge setup` writes it)"
    except (ValueError, KeyError, TypeError) as error:
        raise JuliaNotFoundError(
            f"{path} is not what `pybridge setup` writes ({error!r}); run `pybridge setup` again "
            "or delete the file"
        ) from error
    return _checked(exe, project, f"pybridge setup ({path})")


def _from_juliapkg():
    # juliapkg records what it last resolved; reading it starts and downloads nothing.
    prefix = sys.prefix if sys.prefix != sys.base_prefix else os.environ.get("CONDA_PREFIX")
    project = os.environ.get("PYTHON_JULIAPKG_PROJECT") or (prefix and f"{prefix}/julia_env")
    if not project:
        return "juliapkg: no environment for this Python"
    meta = Path(project) / "pyjuliapkg" / "meta.json"
    try:
        exe = json.loads(meta.read_text())["executable"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"juliapkg: nothing resolved in {project}"
    lacking = missing_packages(project)
    if lacking:
        return f"juliapkg: the project {project} lacks {', '.join(lacking)}"
    return _checked(exe, project, "juliapkg")


def _from_path():
    exe = shutil.which("julia")
    if exe is None:
        return "julia on PATH: not there"
    project = os.environ.get("JULIA_PROJECT")
    if not project:
        return f"julia on PATH ({exe}): JULIA_PROJECT is not set, so there is no project to use"
    lacking = missing_packages(project)
    if lacking:
        return f"julia on PATH ({exe}): its project {project} lacks {', '.join(lacking)}"
    return _checked(exe, project, "julia on PATH and JULIA_PROJECT")


def _checked(exe, project, rule):
    full = shutil.which(exe)
    if full is None:
        raise JuliaNotFoundError(f"{exe} (by {rule}) is not an executable.\n{_CHOICES}")
    if not Path(project).is_dir():
        raise JuliaNotFoundError(f"{project} (by {rule}) is not a folder.\n{_CHOICES}")
    return os.path.abspath(full), os.path.abspath(project), rule


def missing_packages(project, needed=NEEDED) -> list[str]:
    """The needed packages that the project's manifest does not have."""
    for name in ("JuliaManifest.toml", "Manifest.toml"):
        path = Path(project) / name
        if path.is_file():
            manifest = tomllib.loads(path.read_text())
            there = manifest.get("deps", manifest)
            return [package for package in needed if package not in there]
    return list(needed)


@functools.cache
def probe(exe) -> tuple[str, str, str]:
    """Version, libjulia and BINDIR of a Julia executable.

    Raises:
      JuliaNotFoundError: it does not run.
    """
    code = (
        'import Libdl; print(VERSION, "\\0", abspath(Libdl.dlpath("libjulia")), "\\0", Sys.BINDIR)'
    )
    command = [exe, "--startup-file=no", "-O0", "--compile=min", "-e", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        version, lib, bindir = done.stdout.split("\0")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or error
        raise JuliaNotFoundError(f"{exe} does not run: {said}\n{_CHOICES}") from error
    return version, lib, bindir
