"""Which Julia is found by which rule, what setup records, what doctor says."""

import json
import stat

import pytest
from julia_fixture import run_python
from rich.console import Console

from pybridge import JuliaNotFoundError, doctor, julia_function, setup
from pybridge.julia import find


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without Julia."""
    for name in ("EXE", "PROJECT", "LIB", "BINDIR"):
        monkeypatch.delenv(f"PYTHON_JULIACALL_{name}", raising=False)
    monkeypatch.delenv("JULIA_PROJECT", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYTHON_JULIAPKG_PROJECT", str(tmp_path / "none"))
    return tmp_path


def fake_julia(folder, version="1.10.5"):
    """A program that answers what a Julia of that version would, for rules that start none."""
    folder.mkdir(parents=True, exist_ok=True)
    exe = folder / "julia"
    exe.write_text(f"#!/bin/sh\nprintf '{version}\\0/lib/libjulia.so\\0/bin'\n")
    exe.chmod(exe.stat().st_mode | stat.S_IXUSR)
    return exe


def project(folder, *packages):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Manifest.toml").write_text(
        "".join(f'[[deps.{name}]]\nversion = "0.1.2"\n' for name in packages)
    )
    return folder


NEEDED = ("NestedGradients", "PythonCall", "Zygote")


def test_no_julia_names_the_choices(nowhere):
    with pytest.raises(JuliaNotFoundError) as caught:
        find.find()
    text = str(caught.value)
    for choice in ("pybridge setup", "--julia EXE --project DIR", "PYTHON_JULIACALL_EXE"):
        assert choice in text
    assert "Nothing is downloaded" in text
    assert len(caught.value.tried) == 4


def test_first_use_without_a_julia_is_that_error(nowhere):
    code = (
        "import pybridge\n"
        "f = pybridge.julia_function('x -> x')\n"
        "try: f(1.0)\n"
        "except pybridge.JuliaNotFoundError as e: print(e)\n"
    )
    assert "pybridge setup" in run_python(code).stdout
    assert list(nowhere.rglob("Manifest.toml")) == []


def test_the_order_of_the_rules(nowhere, monkeypatch):
    on_path = fake_julia(nowhere / "path")
    monkeypatch.setenv("PATH", f"{nowhere / 'path'}:/bin:/usr/bin")
    with pytest.raises(JuliaNotFoundError, match="JULIA_PROJECT is not set"):
        find.find()
    monkeypatch.setenv("JULIA_PROJECT", str(project(nowhere / "active", *NEEDED)))
    assert find.find().rule == "julia on PATH and JULIA_PROJECT"

    pkg = project(nowhere / "none", *NEEDED)
    (pkg / "pyjuliapkg").mkdir()
    (pkg / "pyjuliapkg" / "meta.json").write_text(json.dumps({"executable": str(on_path)}))
    assert find.find().rule == "juliapkg"

    recorded = fake_julia(nowhere / "recorded")
    setup.record(recorded, project(nowhere / "mine", *NEEDED))
    found = find.find()
    assert found.exe == str(recorded)
    assert found.rule.startswith("pybridge setup")

    own = fake_julia(nowhere / "own")
    monkeypatch.setenv("PYTHON_JULIACALL_EXE", str(own))
    with pytest.raises(JuliaNotFoundError, match="PYTHON_JULIACALL_PROJECT is not"):
        find.find()
    monkeypatch.setenv("PYTHON_JULIACALL_PROJECT", str(nowhere / "mine"))
    found = find.find()
    assert (found.exe, found.version) == (str(own), "1.10.5")
    assert found.rule == "PYTHON_JULIACALL_EXE and PYTHON_JULIACALL_PROJECT"


def test_a_julia_that_is_too_old(nowhere, monkeypatch):
    exe = fake_julia(nowhere / "old", "1.9.4")
    setup.record(exe, project(nowhere / "mine", *NEEDED))
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    with pytest.raises(JuliaNotFoundError, match=r"1\.9\.4 .* too old: pybridge needs Julia 1\.10"):
        find.find()
    assert find.older("1.9.4")
    assert not find.older("1.10.0")
    assert not find.older("2.0.0-rc1")


def test_a_record_that_is_not_ours(nowhere):
    path = find.config_file()
    path.parent.mkdir(parents=True)
    path.write_text("[julia]")
    with pytest.raises(JuliaNotFoundError, match="run `pybridge setup` again"):
        find.find()


def run(command, **options):
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    code = command(console=console, **options)
    return code, console.export_text()


def test_setup_records_a_julia_that_is_complete(nowhere, monkeypatch):
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    exe = fake_julia(nowhere / "mine")
    folder = project(nowhere / "project", "PythonCall")
    code, text = run(setup.setup, julia=str(exe), project=str(folder))
    assert code == 1
    assert "lacks NestedGradients, Zygote" in text
    assert "Pkg.develop(path=" in text
    assert 'Pkg.add(["Zygote"])' in text
    assert not find.config_file().exists()
    project(folder, *NEEDED)
    code, text = run(setup.setup, julia=str(exe), project=str(folder))
    assert code == 0
    assert json.loads(find.config_file().read_text()) == {
        "exe": str(exe),
        "project": str(folder.resolve()),
    }


def test_setup_names_what_is_wrong(nowhere, monkeypatch):
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    assert "no julia on PATH" in run(setup.setup, project=str(nowhere))[1]
    assert "is not an executable" in run(setup.setup, julia="/no/julia", project="/")[1]
    old = fake_julia(nowhere / "old", "1.6.7")
    assert "too old" in run(setup.setup, julia=str(old), project=str(nowhere))[1]
    new = fake_julia(nowhere / "new")
    assert "is not a folder" in run(setup.setup, julia=str(new), project="/no/where")[1]


def test_doctor_without_a_julia(nowhere):
    code, text = run(doctor.doctor)
    assert code == 0
    assert "all is well for the jax engine" in text
    assert "the Julia engine is not set up: `pybridge setup`" in text
    code, text = run(doctor.doctor, engine="julia")
    assert code == 1
    assert "PROBLEM no Julia" in text
    assert "pybridge setup" in text
    with pytest.raises(ValueError, match="'torch'; accepted are 'jax' and 'julia'"):
        doctor.doctor("torch")


def test_doctor_names_a_julia_package_of_another_version(nowhere, monkeypatch):
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    setup.record(fake_julia(nowhere / "mine"), project(nowhere / "project", *NEEDED))
    code, text = run(doctor.doctor)
    assert code == 0
    assert "`pybridge doctor --engine julia` tries the Julia engine" in text
    report = doctor.Report()
    doctor._look_for_julia(report, "julia")
    ((what, remedy),) = report.problems
    assert "NestedGradients 0.1.2; this pybridge belongs to 0.1.0" in what
    assert "Pkg.develop(path=" in remedy


def test_doctor_with_a_julia(julia):
    code, text = run(doctor.doctor, engine="julia")
    assert code == 0, text
    for part in ("julia engine", "works", "Zygote", "by ", "border", "ffi", "Julia threads"):
        assert part in text


def test_signals_off_are_a_problem(julia_there, monkeypatch):
    monkeypatch.setenv("PYTHON_JULIACALL_HANDLE_SIGNALS", "no")
    report = doctor.examine("julia")
    assert any("HANDLE_SIGNALS" in what for what, _ in report.problems)


def test_a_function_is_made_without_starting_julia(nowhere):
    assert julia_function("x -> x").__name__.startswith("julia_function_")
