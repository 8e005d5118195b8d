"""What may hang or crash a process: threads, signals, forks, exits, order of imports."""

import importlib.util
import socket
import subprocess
import sys
import textwrap

import pytest
from julia_fixture import run_python

START = """
import jax, jax.numpy as jnp, numpy as np, pybridge
from pybridge import julia_function
from pybridge.julia.errors import julia_errors
f = jax.jit(julia_function("x -> (y = [sum(x .+ i) for i in 1:50]; sum(y) / 50)",
            result=jax.ShapeDtypeStruct((), "float32")))
"""


def script(body, before="", **options):
    return run_python(before + START + textwrap.dedent(body), **options)


def test_threads_that_allocate_while_everybody_collects(julia_there):
    # Four threads through jit, pure_callback and juliacall, collections from both sides.
    done = script("""
        import threading, time
        from pybridge.julia.runtime import lock, runtime
        jl = runtime().juliacall.Main
        g = jl.seval("x -> sum([x + i for i in 1:100])")
        x = jnp.arange(1000.0)
        right = float(f(x))
        host = jax.jit(lambda x: jax.pure_callback(
            lambda y: np.float32(np.asarray(y).sum()), jax.ShapeDtypeStruct((), "f"), x))
        until, bad, count = time.time() + 6, [], [0]
        def work(n):
            while time.time() < until:
                if n % 4 == 3:
                    with lock: y = g(1.0)
                    if y != 5150.0: bad.append(y)
                elif n % 4 == 2 and float(host(x[:10])) != 45: bad.append("host")
                if float(f(x)) != right: bad.append(n)
                count[0] += 1
        def loop(n):
            try: work(n)
            except BaseException as e: bad.append(repr(e))
        threads = [threading.Thread(target=loop, args=(n,)) for n in range(4)]
        for t in threads: t.start()
        while time.time() < until:
            runtime().ask("GC.gc()")
            with lock: jl.GC.gc(False)
            time.sleep(0.05)
        for t in threads: t.join(60)
        assert not any(t.is_alive() for t in threads), "hangs"
        assert not bad, bad[:3]
        print("calls", count[0])
    """)
    assert int(done.stdout.split()[-1]) > 10


def test_julia_prints_sleeps_and_runs_processes_on_any_thread(julia_there):
    # Each waits for Julia's event loop, which by itself only the thread that started Julia turns.
    done = script("""
        import threading
        code = 'x -> (sleep(0.01); println("from Julia"); run(`true`); sum(x))'
        g = jax.jit(julia_function(code, result=jax.ShapeDtypeStruct((), "float32")))
        x = jnp.ones(100_000)
        def work():
            for _ in range(5): assert g(x) == 100_000
        ts = [threading.Thread(target=work) for _ in range(4)]
        for t in ts: t.start()
        from pybridge.julia.runtime import runtime
        for _ in range(5): runtime().ask("GC.gc()")
        for t in ts: t.join()
    """)
    assert done.stdout.split("\n") == ["from Julia"] * 20 + [""]


def test_tasks_that_julia_code_spawns_find_a_thread(julia_there):
    # Julia's first thread is Python's and takes none; XLA's threads take none either.
    done = script("""
        beside = lambda x: jnp.sum(jnp.outer(x, x) @ jnp.ones((3, 400)))  # so XLA has a thread of its own
        g = julia_function("x -> fetch(Threads.@spawn sum(x))", result=jax.ShapeDtypeStruct((), "float32"))
        call = jax.jit(lambda x: g(x) + beside(x))
        for _ in range(3): assert call(jnp.ones(3)) == 3603
        h = julia_function("(x, w) -> sum(x .* w)", threads=True)
        call = jax.jit(lambda x: jnp.sum(jax.vmap(h, (0, None))(x, jnp.ones(3))) + beside(x[0]))
        for _ in range(3): assert call(jnp.ones((50, 3))) == 3750
        fails = julia_function('x -> fetch(Threads.@spawn error("in a task"))', result=lambda x: x)
        try: jax.jit(lambda x: fails(x) + beside(x))(jnp.ones(3)).block_until_ready()
        except pybridge.JuliaError as e: print(e.message)
    """)
    assert done.stdout == "in a task\n"


def test_the_number_of_julias_threads_changes_no_bit(julia_there):
    body = """
        import hashlib
        g = julia_function("(x, w) -> sum(sin.(x .* w)) + Threads.nthreads() * 0", threads=True)
        x = np.random.default_rng(0).normal(size=(203, 5)).astype("f")
        w = jnp.linspace(0.5, 2, 5)
        total = lambda w: jnp.sum(jax.vmap(g, (0, None))(x, w))
        out = jax.jit(jax.value_and_grad(total))(w)
        from pybridge.julia.runtime import runtime
        print(runtime().ask("Threads.nthreads()"))
        print(hashlib.sha256(b"".join(np.asarray(o).tobytes() for o in out)).hexdigest())
    """
    runs = [script(body, env={"JULIA_NUM_THREADS": n}).stdout.split() for n in ("1", "3")]
    assert [run[0] for run in runs] == ["2", "3"]  # the first is Python's
    assert runs[0][1] == runs[1][1]


def test_signals_of_python_stay_pythons_and_the_session_goes_on(julia_there):
    script("""
        import signal, threading, os
        got = []
        for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(s, lambda n, _: got.append(n))
        slow = jax.jit(julia_function("x -> (t = time(); while time() < t + 1; end; x)",
                       result=jax.ShapeDtypeStruct((), "f")))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        slow(1.0).block_until_ready()
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            for _ in range(5): slow(1.0).block_until_ready()
            raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        assert slow(2.0) == 2
        assert f(jnp.ones(3)) > 0
        for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
            os.kill(os.getpid(), s)
        import time; time.sleep(0.2)
        assert sorted(got) == sorted(map(int, (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1,
                                               signal.SIGALRM))), got
    """)


@pytest.mark.parametrize("when", ["after", "off again"])
def test_faulthandler_takes_no_safepoint_away(julia_there, when):
    code = """
        import faulthandler, threading
        {before}
        f(jnp.ones(3)).block_until_ready()
        {after}
        from pybridge.julia.runtime import runtime
        def work():
            for _ in range(300): f(jnp.ones(100)).block_until_ready()
        ts = [threading.Thread(target=work) for _ in range(3)]
        for t in ts: t.start()
        for _ in range(30): runtime().ask("GC.gc()")
        for t in ts: t.join()
    """
    if when == "after":
        script(code.format(before="", after="faulthandler.enable()"))
    else:  # on by the interpreter, before Julia; off as pytest does at its end
        script(
            code.format(before="", after="faulthandler.disable()"), env={"PYTHONFAULTHANDLER": "1"}
        )


def test_a_forked_child_gets_an_error_and_a_spawned_one_works(julia_there, tmp_path):
    program = tmp_path / "child.py"
    program.write_text(
        START
        + textwrap.dedent("""
        import multiprocessing, os, sys
        def child(queue):
            try: queue.put(("value", float(f(jnp.ones(3)))))
            except Exception as e: queue.put((type(e).__name__, str(e)))
        def fresh(queue):
            try: queue.put(("value", julia_function("x -> x + 1").id))
            except Exception as e: queue.put((type(e).__name__, str(e)))
        if __name__ == "__main__":
            f(jnp.ones(3)).block_until_ready()
            for how, target in (("fork", fresh), ("spawn", child)):
                context = multiprocessing.get_context(how)
                queue = context.Queue()
                p = context.Process(target=target, args=(queue,))
                p.start()
                print(how, queue.get(timeout=60))
                p.join(60)
                assert p.exitcode == 0, p.exitcode
            f(jnp.ones(3)).block_until_ready()
    """)
    )
    done = run_python(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
    fork, spawn = done.stdout.strip().splitlines()
    assert "RuntimeError" in fork
    assert "fork" in fork
    assert "spawn" in fork
    assert spawn.startswith("spawn ('value', ")


def test_a_forked_child_that_calls_a_compiled_program(julia_there):
    script("""
        import os, sys, warnings
        warnings.simplefilter("ignore")
        f(jnp.ones(3)).block_until_ready()
        pid = os.fork()
        if pid == 0:
            try: f(jnp.ones(3)).block_until_ready()
            except Exception as e: os._exit(7 if "forked" in str(e) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    """)


@pytest.mark.parametrize("path", ["ffi", "callback"])
def test_a_forked_child_ends_as_any_other(julia_there, path):
    # Without the border's care Julia's exit hook, JAX's client and juliacall's objects crash it.
    done = script(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        f(jnp.ones(3)).block_until_ready()
        from juliacall import Main as jl
        held = [jl.seval(code) for code in ("Ref(1)", "x -> x + 1", "Dict(1 => [2])", "1:2")]
        def uses():
            try: julia_function("x -> x")(1.0)
            except RuntimeError as e: assert "forked" in str(e)
            else: raise SystemExit("used Julia")
        for act, right in ((uses, 0), (lambda: sys.exit(3), 3), (lambda: held.clear(), 0),
                           (lambda: 1 / 0, 1)):
            if (pid := os.fork()) == 0:
                break
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == right, act
        if pid == 0:
            act()
        else:
            assert f(jnp.ones(3)) > 0 and held[1](2) == 3
            print("the parent is well")
        """,
        env={"PYBRIDGE_BORDER": path},
    )
    assert done.stdout == "the parent is well\n"
    assert "ZeroDivisionError" in done.stderr
    assert "signal" not in done.stderr


def test_exit_with_pending_work_is_clean(julia_there):
    done = script("""
        slow = jax.jit(julia_function("x -> (t = time(); while time() < t + 0.5; end; sum(x))",
                       result=jax.ShapeDtypeStruct((), "f")))
        x = jnp.ones(100_000)
        slow(x).block_until_ready()
        pending = [slow(x) for _ in range(3)]
        slow(x)
    """)
    assert done.stderr == ""


def test_signals_off_allow_one_thread_and_refuse_more(julia_there):
    done = script(
        """
        import threading
        slow = jax.jit(julia_function("x -> (t = time(); while time() < t + 0.5; end; x)",
                       result=jax.ShapeDtypeStruct((), "f")))
        assert slow(3.0) == 3
        said = []
        def work():
            try:
                with julia_errors(): slow(1.0).block_until_ready()
            except pybridge.JuliaError as e: said.append(str(e))
        ts = [threading.Thread(target=work) for _ in range(3)]
        for t in ts: t.start()
        for t in ts: t.join()
        assert said and all("PYTHON_JULIACALL_HANDLE_SIGNALS" in s for s in said), said
        print("refused", len(said))
        assert slow(4.0) == 4
        """,
        env={"PYTHON_JULIACALL_HANDLE_SIGNALS": "no"},
    )
    assert "refused" in done.stdout


def test_started_on_a_thread_that_ends(julia_there):
    script("""
        import threading
        from pybridge.julia.runtime import runtime
        t = threading.Thread(target=lambda: f(jnp.ones(3)).block_until_ready())
        t.start(); t.join()
        for _ in range(50):
            f(jnp.ones(1000)).block_until_ready()
            runtime().ask("GC.gc()")
    """)


def test_four_devices_each_call_with_their_own_part(julia_there):
    script(
        """
        from jax.sharding import PartitionSpec as P
        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        g = julia_function("(x, w) -> sum(abs2, x .* w) .+ 0 .* x")
        local = lambda x, w: g(x, w)
        h = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")))
        x, w = jnp.arange(8.0), jnp.float32(2)
        right = np.repeat((2 * np.arange(8.0).reshape(4, 2)) ** 2 @ np.ones(2), 2)
        np.testing.assert_allclose(h(x, w), right)
        text = h.lower(x, w).compile().as_text()
        assert "all-gather" not in text and "f32[2]" in text
        total = lambda w: jnp.sum(h(x, w))
        np.testing.assert_allclose(jax.grad(total)(w), 2 * 2 * 2 * np.sum(np.arange(8.0) ** 2))
        """,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from pybridge import julia_function
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
g = julia_function("(x, w) -> sum(abs2, x .* w)", result=jax.ShapeDtypeStruct((), "float32"))
total = jax.jit(jax.shard_map(lambda x, w: jax.lax.psum(g(x, w), "i"), mesh=mesh,
                              in_specs=(P("i"), P()), out_specs=P()))
own = np.arange(4.0, dtype="f") + 4 * int(sys.argv[1])
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), own)
print(float(total(x, jnp.float32(2))), float(jax.grad(lambda w: total(x, w))(jnp.float32(2))))
"""


def test_two_processes_with_a_julia_each(julia_there, tmp_path):
    program = tmp_path / "part.py"
    program.write_text(TWO_PROCESSES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parts = [
        subprocess.Popen(
            [sys.executable, program, str(i), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    right = 4 * sum(i * i for i in range(8))  # and so is its derivative at w = 2
    for part in parts:
        out, err = part.communicate(timeout=120)
        assert part.returncode == 0, err
        assert out.splitlines()[-1] == f"{float(right)} {float(right)}"


def test_juliacall_imported_first(julia_there):
    script(
        """
        assert jl.seval("1 + 1") == 2
        assert f(jnp.ones(3)) > 0
        assert jl.seval("2 + 2") == 4
        """,
        before="import os\nfrom pybridge.julia import find\nj = find.find()\n"
        "os.environ['PYTHON_JULIACALL_EXE'] = j.exe\n"
        "os.environ['PYTHON_JULIACALL_PROJECT'] = j.project\n"
        "from juliacall import Main as jl\n",
    )


def test_pybridge_before_jax(julia_there):
    run_python(
        textwrap.dedent("""
        import pybridge
        f = pybridge.julia_function("x -> sum(x .^ 2)")
        from pybridge.julia.runtime import runtime
        assert runtime().ask("1 + 1") == "2"
        import jax, jax.numpy as jnp
        assert jax.jit(jax.grad(f))(jnp.ones(3)).tolist() == [2, 2, 2]
        """)
    )


@pytest.mark.parametrize("order", ["torch, jax, pybridge", "jax, torch, pybridge", "pybridge, jax"])
def test_torch_in_between(julia_there, order):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is installed only to try this: no extra of ours holds 800 MB of it")
    script(
        """
        f(jnp.ones(100))
        import threading, torch
        t = torch.ones(200, 200)
        def work():
            for _ in range(20): assert f(jnp.ones(100)) > 0 and float((t @ t).sum()) == 8e6
        ts = [threading.Thread(target=work) for _ in range(3)]
        for thread in ts: thread.start()
        for thread in ts: thread.join()
        """,
        before="".join(f"import {name}\n" for name in order.split(", ")),
    )


def test_pythons_sigchld_is_kept_though_julia_precompiles(julia_there, tmp_path):
    # Tiny1 and Tiny2 are precompiled as they are loaded, by a process that Julia has to wait for.
    for n in (1, 2):
        source = tmp_path / "packages" / f"Tiny{n}" / "src"
        source.mkdir(parents=True)
        uuid = f"6f0e2c5e-0000-4000-8000-00000000000{n}"
        (source.parent / "Project.toml").write_text(f'name = "Tiny{n}"\nuuid = "{uuid}"\n')
        code = f"module Tiny{n}\nexport tiny{n}\ntiny{n}(x) = {n}x\nend\n"
        (source / f"Tiny{n}.jl").write_text(code)
    script(
        """
        import signal, subprocess
        heard = []
        signal.signal(signal.SIGCHLD, lambda number, _: heard.append(number))
        f(jnp.ones(3)).block_until_ready()
        for n in (1, 2):
            assert julia_function(f"tiny{n}", using=f"Tiny{n}")(2.0) == 2 * n
            heard.clear()
            assert subprocess.run(["sh", "-c", "exit 3"]).returncode == 3
            assert heard
        """,
        env={
            "JULIA_DEPOT_PATH": f"{tmp_path}/depot:",
            "JULIA_LOAD_PATH": f"@:@stdlib:{tmp_path}/packages",
        },
    )
    assert list((tmp_path / "depot" / "compiled").rglob("Tiny2*"))


def test_julia_prints_on_xlas_threads_under_ipython(julia_there):
    pytest.importorskip("IPython", reason="pip install 'pybridge-julia[notebooks]' (ipython)")
    cell = START + textwrap.dedent("""
        print_ = 'x -> (println("from Julia"); flush(stdout); sum(x))'
        g = jax.jit(julia_function(print_, result=jax.ShapeDtypeStruct((), "float32")))
        total = sum(float(g(jnp.arange(100_000.0) + n)) for n in range(20))
    """)
    done = run_python(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"shell.run_cell({cell!r}).raise_error()\n"
        "assert not any('juliacall' in name for name in shell.extension_manager.loaded)\n"
        "print('done')\n"
    )
    assert done.stdout.count("from Julia") == 20
    assert done.stdout.endswith("done\n")


def test_one_line_while_julia_starts_and_compiles(julia_there):
    body = """
        slow = julia_function("x -> (t = time(); while time() < t + 2.5; end; x)", name="slow",
                              result=jax.ShapeDtypeStruct((), "f"))
        print(slow(1.0))
    """
    assert script(body).stderr == ""
    done = script(body, env={"PYBRIDGE_PROGRESS": "1"})
    assert done.stdout == "1.0\n"
    start, *_, compiles = done.stderr.splitlines()
    assert start.startswith("pybridge: starting Julia 1.")
    assert compiles == "pybridge: Julia compiles the first call of slow ..."
    wrong = script(body, env={"PYBRIDGE_PROGRESS": "yes"}, check=False)
    assert "PYBRIDGE_PROGRESS is 'yes'; accepted are" in wrong.stderr


def test_import_pybridge_starts_no_julia():
    run_python("import sys, pybridge; assert 'juliacall' not in sys.modules")
