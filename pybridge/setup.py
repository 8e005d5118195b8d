"""``pybridge setup``: install a Julia and the packages for the Julia engine, or record yours."""

import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import platformdirs

from pybridge.julia import find
from pybridge.julia.errors import JuliaNotFoundError

# juliapkg reads its settings when it is imported and keeps one project a process: so in a process of
# its own, where our project is the one, and no other `import juliacall` ever finds our packages.
_INSTALL = """
import json, sys
import juliapkg
requirements = json.load(open(sys.argv[1]))
juliapkg.require_julia(requirements["julia"])
for name, about in requirements["packages"].items():
    if about.pop("dev", False):
        about |= {"dev": True, "path": sys.argv[2]}
    juliapkg.add(name, **about)
juliapkg.resolve()
print(json.dumps({"exe": juliapkg.executable(), "project": juliapkg.project()}))
"""


def setup(julia=None, project=None, console=None) -> int:
    """Install what the Julia engine needs, or record what is there. Returns an exit code.

    Args:
      julia: a Julia executable to use; None with ``project`` None installs one through juliapkg.
      project: a Julia project that holds NestedGradients, PythonCall and Zygote. None with
        ``julia`` given makes one in the user's data folder and installs the packages into it.
      console: a ``rich.console.Console``.
    """
    if console is None:
        from rich.console import Console

        console = Console()
    try:
        if julia is None and project is None:
            exe, project = _install_through_juliapkg(console)
        else:
            exe = _executable(julia)
            version, _, _ = find.probe(exe)
            _check_version(exe, version)
            if project is None:
                project = _own_project()
                _install_into(exe, project, console)
            project = _checked_project(exe, project)
    except JuliaNotFoundError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    record(exe, project)
    console.print(
        f"recorded in {find.config_file()}:", markup=False, highlight=False, soft_wrap=True
    )
    console.print(
        f"  julia   {exe}\n  project {project}", markup=False, highlight=False, soft_wrap=True
    )
    console.print(
        "`pybridge doctor --engine julia` tries it.", markup=False, highlight=False, soft_wrap=True
    )
    return 0


def record(exe, project):
    """Write the choice to the user's configuration folder."""
    path = find.config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"exe": str(exe), "project": str(project)}, indent=2) + "\n")


def julia_package() -> Path:
    """The Julia package NestedGradients: in the wheel, or beside this checkout."""
    shipped = Path(str(resources.files("pybridge.julia"))) / "NestedGradients"
    checkout = Path(__file__).resolve().parent.parent / "julia"
    for folder in (shipped, checkout):
        if (folder / "Project.toml").is_file():
            return folder
    raise JuliaNotFoundError(f"the Julia package is neither at {shipped} nor at {checkout}")


def _requirements():
    return resources.files("pybridge.julia").joinpath("requirements.json")


def _executable(julia):
    exe = shutil.which(julia or "julia")
    if exe is None:
        raise JuliaNotFoundError(
            f"--julia {julia} is not an executable"
            if julia
            else "there is no julia on PATH: name one with --julia EXE"
        )
    return os.path.abspath(exe)


def _check_version(exe, version):
    if find.older(version):
        raise JuliaNotFoundError(
            f"Julia {version} at {exe} is too old: pybridge needs Julia "
            f"{find.OLDEST[0]}.{find.OLDEST[1]} or newer"
        )


def _checked_project(exe, project):
    folder = Path(project).expanduser().resolve()
    if not folder.is_dir():
        raise JuliaNotFoundError(f"--project {project} is not a folder")
    lacking = find.missing_packages(folder)
    if lacking:
        add = [f'"{name}"' for name in lacking if name != "NestedGradients"]
        steps = ["using Pkg"]
        if "NestedGradients" in lacking:
            steps.append(f'Pkg.develop(path="{julia_package()}")')
        if add:
            steps.append(f"Pkg.add([{', '.join(add)}])")
        raise JuliaNotFoundError(
            f"the project {folder} lacks {', '.join(lacking)}. Add them:\n"
            f"  {exe} --project={folder} -e '{'; '.join(steps)}'"
        )
    return str(folder)


def _own_project():
    return str(Path(platformdirs.user_data_dir("pybridge")) / "julia_env")


def _install_into(exe, project, console):
    packages = json.loads(_requirements().read_text())["packages"]
    add = ", ".join(
        f'PackageSpec(name="{name}", uuid="{about["uuid"]}")'
        for name, about in packages.items()
        if not about.get("dev")
    )
    code = f'using Pkg; Pkg.develop(path="{julia_package()}"); Pkg.add([{add}]); Pkg.precompile()'
    Path(project).mkdir(parents=True, exist_ok=True)
    console.print(
        f"installing the Julia packages into {project}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    done = subprocess.run([exe, "--startup-file=no", f"--project={project}", "-e", code])
    if done.returncode != 0:
        raise JuliaNotFoundError("Julia's package manager failed; its own messages are above")


def _install_through_juliapkg(console):
    project = _own_project()
    Path(project).mkdir(parents=True, exist_ok=True)
    console.print(
        f"installing Julia and the packages through juliapkg into {project}; this downloads about "
        "1 GB",
        markup=False,
        highlight=False,
    )
    environment = os.environ | {"PYTHON_JULIAPKG_PROJECT": project}
    with resources.as_file(_requirements()) as requirements:
        done = subprocess.run(
            [sys.executable, "-c", _INSTALL, str(requirements), str(julia_package())],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
    if done.returncode != 0:
        raise JuliaNotFoundError(
            "juliapkg failed; its own messages are above. With a Julia of your own: pybridge setup "
            "--julia EXE"
        )
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["exe"], result["project"]
