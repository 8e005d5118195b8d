"""All checks of the repository: lint of both languages, the Python tests, the Julia tests.

``make test`` runs this. What needs Julia runs where a fit Julia is found; one line at the end says
what ran live and what from recorded values. ``--only lint|python|julia`` runs one part. The Julia package
that is tested is this checkout's, whichever one the Julia project at hand has.
"""

import argparse
import atexit
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sysconfig.get_path("scripts"))


def lint():
    package, benchmarks = (
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.jl"))
        for folder in ("julia", "benchmarks")
    )
    commands = [
        [BIN / "ruff", "check", "."],
        [BIN / "ruff", "format", "--check", "."],
        # Apart: fatou asks all files it is given whether a name is used, by what they include.
        [BIN / "fatou", "lint", *package],
        [BIN / "fatou", "lint", *benchmarks],
        [BIN / "fatou", "format", "--check", *package, *benchmarks],
    ]
    return [step(command) for command in commands]


def python(arguments):
    # A process a core, each with its own Julia if there is one; files stay whole.
    workers = str(min(4, os.cpu_count() or 1))
    return [step([sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadfile", *arguments])]


def julia(found):
    return [found.exe, f"--project={found.project}", "--threads=2", "julia/test/runtests.jl"]


def find():
    """The Julia that pybridge would use, or None and why not."""
    from pybridge.julia import find
    from pybridge.julia.errors import JuliaNotFoundError

    try:
        return with_this_package(find.find()), ""
    except JuliaNotFoundError as error:
        return None, str(error).splitlines()[0].rstrip(".")


def with_this_package(found):
    """The same Julia, in a copy of its project where NestedGradients is this checkout's."""
    here = ROOT / "julia"
    project = pathlib.Path(found.project)
    (manifest,) = [
        p for p in (project / "JuliaManifest.toml", project / "Manifest.toml") if p.is_file()
    ][:1]
    copy = pathlib.Path(tempfile.mkdtemp(prefix="pybridge-julia-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    package, lines = None, []
    for line in manifest.read_text().splitlines():
        if line.startswith("[[deps."):
            package = line.removeprefix("[[deps.").removesuffix("]]")
        key, _, value = line.partition(" = ")
        if package == "NestedGradients" and key == "uuid":
            lines.append(f'path = "{here}"')
        elif package == "NestedGradients" and key in (
            "path",
            "git-tree-sha1",
            "repo-url",
            "repo-rev",
        ):
            if key == "path" and (project / value.strip('"')).resolve() == here:
                return found
            continue
        elif key == "path":
            line = f'path = "{(project / value.strip(chr(34))).resolve()}"'
        lines.append(line)
    (copy / "Manifest.toml").write_text("\n".join(lines) + "\n")
    for name in ("Project.toml", "JuliaProject.toml"):
        if (project / name).is_file():
            shutil.copy(project / name, copy / "Project.toml")
    os.environ["PYTHON_JULIACALL_EXE"] = found.exe
    os.environ["PYTHON_JULIACALL_PROJECT"] = str(copy)
    return dataclasses.replace(found, project=str(copy))


def step(command):
    command = [str(part) for part in command]
    shown = " ".join(command[:5]) + (" ..." if len(command) > 5 else "")
    print(f"\n== {shown}", flush=True)
    return shown, subprocess.run(command, cwd=ROOT).returncode


def background(command):
    """Start a step whose output is shown when the function that is returned is called."""
    output = tempfile.TemporaryFile()  # noqa: SIM115  it outlives this call
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    atexit.register(process.terminate)

    def finish():
        print(f"\n== {' '.join(command)}", flush=True)
        code = process.wait()
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout.buffer)
        sys.stdout.flush()
        return " ".join(command), code

    return finish


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["lint", "python", "julia"])
    only, arguments = parser.parse_known_args()
    only = only.only
    found, why = find()
    steps = []
    # Julia's suite compiles on one core for many minutes, so it runs beside the others.
    beside = background(julia(found)) if found and only in (None, "julia") else None
    if only in (None, "lint"):
        steps += lint()
    if only in (None, "python"):
        steps += python(arguments)
    if beside:
        steps.append(beside())
    failed = [shown for shown, code in steps if code]
    if found is not None:
        print(
            f"\nJulia {found.version} ({found.rule}): the Julia suites and the Julia engine ran live."
        )
    else:
        print(f"\nNo Julia ({why}): the Julia side was checked from recorded values only.")
    for shown in failed:
        print(f"failed: {shown}")
    print(f"checks: {len(steps) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
