"""The one Julia of this process: started once, parked, asked, closed.

Four rules keep it from hanging or crashing; each is argued where it is kept:

- parked: the thread that started Julia counts as GC-safe while it runs Python (``_park``);
- signals: Julia's handlers for what its collector needs, everybody else's for the rest
  (``_Signals``);
- no lock of Python's is held while Julia works: ``ask`` and ``run`` go through ctypes, which lets
  other Python threads run. What goes through juliacall itself takes ``lock``;
- the gate: a forked child, an exiting interpreter, and several threads in a Julia without signal
  handlers get an error from every call.
"""

import atexit
import collections
import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time

from pybridge.julia import find, progress
from pybridge.julia.errors import JuliaError, JuliaNotFoundError

#: Take this round calls of juliacall's own from more than one thread. A thread that is in Julia and
#: waits for Python's global lock, and a second one that holds that lock and waits in Julia for the
#: first to reach a safepoint, would wait for ever.
lock = threading.RLock()

_OPEN, _CLOSED, _FORKED, _ALONE = range(4)
_EXTENSION = "Base.get_extension(NestedGradients, :NestedGradientsPythonCallExt)"

_runtime = None
_starting = threading.Lock()
_forked = False


def runtime() -> "Runtime":
    """The running Julia, started if need be.

    Raises:
      JuliaNotFoundError: there is none; nothing is downloaded.
      RuntimeError: this process is a fork of one that had started Julia.
    """
    global _runtime
    refuse_fork()
    if _runtime is None:
        with _starting:
            if _runtime is None:
                _runtime = _on_lasting_thread(Runtime)
    return _runtime


def started() -> bool:
    return _runtime is not None and not _forked


def refuse_fork():
    if _forked:
        raise RuntimeError(
            "this process was forked from one that had started Julia, and a Julia runtime does not "
            'survive a fork. Use multiprocessing.get_context("spawn"), or start Julia in the child '
            "only."
        )


def _on_lasting_thread(build):
    # The thread that starts Julia must outlive it. The main thread does; a worker may not, so for
    # a worker a thread is made that does nothing afterwards.
    if threading.current_thread() is threading.main_thread():
        return build()
    result = []
    done = threading.Event()

    def start():
        try:
            result.append(build())
        except BaseException as error:
            result.append(error)
        done.set()
        threading.Event().wait()

    threading.Thread(target=start, name="julia", daemon=True).start()
    done.wait()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


class Runtime:
    """Julia and the addresses of its border. Made once, by ``runtime``."""

    def __init__(self):
        before = sys.modules.get("juliacall")
        running = before is not None and getattr(before, "CONFIG", {}).get("inited", False)
        embedded = before is not None and not getattr(before, "CONFIG", {}).get("init", True)
        self.found = None
        self.children = _Children()
        if running or embedded:
            # Somebody else started it: its signals are as they are, and so is its project.
            signals = _Signals()
            self.juliacall = before
            self.signals_on = embedded or before.CONFIG.get("opt_handle_signals") in (True, "yes")
        else:
            self.found = find.find()
            _set_environment(self.found)
            signals = _Signals()
            starting = f"starting Julia {self.found.version}"
            # At once: Python stands still until Julia is there.
            announced = progress.Announcement(starting, patience=0)
            with _for_the_start(self.found), signals, self.children, announced:
                self.juliacall = importlib.import_module("juliacall")
                addresses = self._load()
            self.signals_on = self.juliacall.CONFIG.get("opt_handle_signals") in (True, "yes")
        if running or embedded:
            addresses = self._load()
        signals.keep_safepoints()
        self._bind(dict(pair.split("=") for pair in addresses.split()))
        self._leaving = collections.deque()
        if not self.signals_on:
            self._gate.value = _ALONE
        if not embedded:
            self._park()
            atexit.register(self._close)
        os.register_at_fork(after_in_child=self._in_forked_child)

    def _load(self):
        jl = self.juliacall.Main
        try:
            # An interactive Julia, as in Jupyter, has Pkg ask the registries before it loads.
            jl.seval(
                "let was = Base.is_interactive\n"
                "Base.eval(:(is_interactive = false))\n"
                "try Core.eval(Main, :(import NestedGradients, Zygote))\n"
                "finally Base.eval(:(is_interactive = $was)) end end"
            )
            if jl.seval(f"{_EXTENSION} === nothing"):
                raise RuntimeError(
                    "NestedGradients' extension for PythonCall did not load; Julia says why above"
                )
            return str(jl.seval(f"{_EXTENSION}.pointers()"))
        except Exception as error:
            said = str(error).strip().splitlines()
            project = jl.seval("dirname(Base.active_project())")
            raise JuliaNotFoundError(
                f"the Julia project {project} does not hold what the Julia engine needs "
                f"({', '.join(find.NEEDED)}): {said[0] if said else error!r}\n"
                "Run `pybridge setup`, or add them to that project."
            ) from error

    def _bind(self, addresses):
        address = {name: int(value) for name, value in addresses.items()}
        pointers = ctypes.POINTER(ctypes.c_void_p)
        # CFUNCTYPE lets go of Python's lock during the call; a returned void pointer is an int.
        self.handler = address["handle"]
        self._run = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, pointers, pointers)(
            address["run"]
        )
        self._answer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)(
            address["answer"]
        )
        self._release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address["release"])
        self._gate = ctypes.c_int32.from_address(address["gate"])
        self._inside = ctypes.c_int64.from_address(address["inside"])
        self._safe_enter = ctypes.CFUNCTYPE(ctypes.c_int8)(address["safe_enter"])
        self._unsafe_enter = ctypes.CFUNCTYPE(ctypes.c_int8)(address["unsafe_enter"])

    def _park(self):
        # A collection begun on any thread waits until every Julia thread is at a safepoint. This
        # thread runs Python for minutes without one. Marked GC-safe it is not waited for; every
        # entry into Julia through a @cfunction, juliacall's own included, marks it unsafe and
        # restores the mark on return.
        self._safe_enter()

    def ask(self, question: str, name: str = "pybridge") -> str:
        """Evaluate one Julia expression in the border's module; its value as text.

        Raises:
          JuliaError: Julia threw; ``name`` is who it is reported of.
        """
        refuse_fork()
        while self._leaving:
            try:
                farewell = self._leaving.popleft()
            except IndexError:
                break
            self._ask(farewell, name)
        return self._ask(question, name)

    def _ask(self, question, name):
        for text in (question, name):
            if "\0" in text:
                raise ValueError("Julia code must not hold a NUL character")
        answer = self._text(self._answer(name.encode(), question.encode()))
        if answer[0] == "-":
            raise JuliaError(answer[1:])
        return answer[1:]

    def _text(self, pointer):
        try:
            return ctypes.string_at(pointer).decode("utf-8", "replace")
        finally:
            self._release(pointer)

    def inside(self) -> int:
        """How many calls Julia is in."""
        return 0 if _forked else self._inside.value

    def run(self, plan: int, inputs, outputs) -> str | None:
        """Run a plan on NumPy arrays, already laid out; the report of an error, or None."""
        refuse_fork()
        report = self._run(plan, _pointers(inputs), _pointers(outputs))
        return self._text(report) if report else None

    def forget(self, question: str):
        """Have ``question`` evaluated at the next ``ask``. Safe in a finalizer, on any thread."""
        self._leaving.append(question)

    def call(self, f, *args):
        """``f(*args)`` for a callable of juliacall's, with the lock that such calls need."""
        refuse_fork()
        with lock:
            return f(*args)

    def _close(self):
        # Runs before juliacall's own exit hook and before JAX's, which waits for programs that
        # still run: by then Julia is gone. So wait for them here, then let nobody in.
        if _forked:
            return
        jax = sys.modules.get("jax")
        if jax is not None:
            for array in jax.live_arrays():
                try:
                    array.block_until_ready()
                except Exception:
                    continue  # an error nobody waited for is nobody's now
        self._gate.value = _CLOSED
        patience = time.monotonic() + 60
        while self.inside() and time.monotonic() < patience:
            time.sleep(0.001)
        self._unsafe_enter()

    def _in_forked_child(self):
        global _forked
        _forked = True
        self._gate.value = _FORKED
        # juliacall's exit hook would take down, in the child, a Julia that is the parent's: its
        # tasks, its files, its processes. It looks the function up when it runs.
        library = getattr(self.juliacall, "CONFIG", {}).get("lib")
        if library is not None:
            library.jl_atexit_hook = lambda code: None
        # Julia code runs whenever Python destroys an object of juliacall's, at the latest as the
        # child ends, and crashes it. The destructor of a plain object is enough there: in
        # PyTypeObject it follows the head, ob_size and tp_name, tp_basicsize, tp_itemsize.
        values = getattr(self.juliacall, "ValueBase", None)
        if values is not None:
            place = object.__basicsize__ + 4 * ctypes.sizeof(ctypes.c_void_p)
            theirs, plain = (ctypes.c_void_p.from_address(id(t) + place) for t in (values, object))
            theirs.value = plain.value


def _pointers(arrays):
    return (ctypes.c_void_p * max(1, len(arrays)))(*(array.ctypes.data for array in arrays))


def _set_environment(found):
    # Executable and project together: juliacall then asks juliapkg nothing, locks nothing, and
    # works offline. Children of this process inherit the choice.
    os.environ["PYTHON_JULIACALL_EXE"] = found.exe
    os.environ["PYTHON_JULIACALL_PROJECT"] = found.project
    if "juliacall-handle-signals" not in sys._xoptions:
        # Safepoints are a SIGSEGV that Julia handles: without its handlers a second thread in
        # Julia is a crash. juliacall's default is off; a user's own choice stands.
        os.environ.setdefault("PYTHON_JULIACALL_HANDLE_SIGNALS", "yes")
    # Its IPython extension writes Julia's output into Python from a Julia task, which crashes when
    # Julia prints on a thread of XLA's. The output arrives without it.
    os.environ.setdefault("PYTHON_JULIACALL_AUTOLOAD_IPYTHON_EXTENSION", "no")


@contextlib.contextmanager
def _for_the_start(found):
    """What juliacall reads from the environment once, and no child of this process should inherit:
    its user may have another number of threads or another Julia in mind."""
    own = {}
    if find.option("threads") is None:
        own["PYTHON_JULIACALL_THREADS"] = find.threads()
    if not os.environ.get("PYTHON_JULIACALL_LIB") and not os.environ.get("PYTHON_JULIACALL_BINDIR"):
        own["PYTHON_JULIACALL_LIB"] = found.lib
        own["PYTHON_JULIACALL_BINDIR"] = found.bindir
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]


class _Signals:
    """Whose handler serves which signal.

    Julia keeps those that it is made of: SIGSEGV is how a thread is stopped at a safepoint, SIGFPE
    is a DivideError, SIGUSR2 interrupts a thread for a backtrace. All others go back to what they
    were before the start, SIGINT and SIGTERM first of all, and the thread's signal mask, in which
    Julia blocks them, with them; of SIGCHLD see ``_Children``.

    Python's faulthandler wants SIGSEGV too. Enabled before Julia's start and disabled later (as
    pytest does at exit) it would restore a handler from before Julia; enabled after the start it
    would take Julia's away. Either way the next collection is a crash. So it is off while Julia
    starts, on again afterwards if it was on, and each time it is switched on Julia's SIGSEGV is put
    back. It then reports the other fatal signals, and Julia reports segmentation faults.
    """

    JULIAS = frozenset(
        {
            signal.SIGSEGV,
            signal.SIGBUS,
            signal.SIGFPE,
            signal.SIGUSR2,
            signal.SIGTRAP,
            signal.SIGCHLD,
        }
    )

    def __enter__(self):
        self.fault = faulthandler.is_enabled()
        if self.fault:
            faulthandler.disable()
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        fixed = self.JULIAS | {signal.SIGKILL, signal.SIGSTOP}
        self.before = {
            number: _sigaction(number)
            for number in signal.valid_signals() - fixed
            if number < signal.SIGRTMIN
        }
        return self

    def __exit__(self, *_):
        for number, action in self.before.items():
            _sigaction(number, action)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        if self.fault:
            julias = _sigaction(signal.SIGSEGV)
            faulthandler.enable()
            _sigaction(signal.SIGSEGV, julias)

    def keep_safepoints(self):
        julias = _sigaction(signal.SIGSEGV)
        plain = faulthandler.enable

        def enable(*args, **kwargs):
            plain(*args, **kwargs)
            if not _forked:
                _sigaction(signal.SIGSEGV, julias)

        enable.__doc__ = plain.__doc__
        faulthandler.enable = enable


class _Children:
    """Who hears that a child process has ended, in a block in which Julia may start one.

    Julia's libuv sets a handler for SIGCHLD when it starts its first process, to precompile a
    package for instance, and counts on it from then on: with another in its place Julia waits for
    ever. Where somebody else had a handler before, that one is back after the block, and libuv's in
    the next block.
    """

    def __init__(self):
        self.libuvs = None

    def __enter__(self):
        self.before = _sigaction(signal.SIGCHLD)
        if self.libuvs is not None:
            _sigaction(signal.SIGCHLD, self.libuvs)

    def __exit__(self, *_):
        after = _sigaction(signal.SIGCHLD)
        if after != self.before:
            self.libuvs = after
            # The first word of the struct; 0 and 1 are the default and nobody.
            if int.from_bytes(self.before[:8], sys.byteorder) > 1:
                _sigaction(signal.SIGCHLD, self.before)


# The action as the C library holds it: Python's signal.signal knows only handlers set by Python.
_libc = ctypes.CDLL(None, use_errno=True)
_ACTION_BYTES = 512  # more than any platform's struct sigaction


def _sigaction(number, action=None):
    old = ctypes.create_string_buffer(_ACTION_BYTES)
    new = None if action is None else ctypes.create_string_buffer(action, _ACTION_BYTES)
    if _libc.sigaction(ctypes.c_int(number), new, old) != 0:
        return None
    return old.raw
