"""What Julia says when something goes wrong, as Python exceptions."""

import contextlib
import re

from jax.errors import JaxRuntimeError

_REPORT = re.compile(r"JuliaError in (.*?): (.*?)\n?\(end of JuliaError\)", re.DOTALL)


class JuliaNotFoundError(RuntimeError):
    """No usable Julia: the message names what was looked for, where, and what to do.

    Attributes:
      tried: one line a rule that found none.
    """

    def __init__(self, message, tried=()):
        super().__init__(message)
        self.tried = list(tried)


class JuliaError(JaxRuntimeError):
    """An exception in Julia code that Python or a compiled JAX program called.

    It is a ``jax.errors.JaxRuntimeError``, since it may come out of a compiled program.

    Attributes:
      function: name of the Julia function.
      message: what Julia's ``showerror`` says.
      lines: the user's own lines of the stack, innermost first.
    """

    @property
    def _parts(self):
        text = str(self.args[0]) if self.args else ""
        found = _REPORT.search(text)
        if not found:
            return "", text, []
        message, *lines = found[2].split("\n  at ")
        return found[1], message, lines

    @property
    def function(self):
        return self._parts[0]

    @property
    def message(self):
        return self._parts[1]

    @property
    def lines(self):
        return self._parts[2]

    def __str__(self):
        function, message, lines = self._parts
        head = f"in the Julia function {function}: " if function else ""
        return "\n  at ".join([head + message, *lines])


@contextlib.contextmanager
def julia_errors():
    """Raise a ``JuliaError`` for whatever exception carries a report of Julia's.

    Most arrive as ``JuliaError`` by themselves. But a jitted function that JAX calls a second time
    by its C++ fast path, and whose program runs at once, raises a plain ``ValueError`` for *every*
    error of the program, whoever made it. Round such calls, and as a decorator of such functions:

    >>> import jax
    >>> from pybridge.julia.errors import julia_errors
    >>> step = julia_errors()(jax.jit(lambda x: 2 * x))
    >>> int(step(2))
    4
    """
    try:
        yield
    except ValueError as error:
        if not _REPORT.search(str(error)):
            raise
        raise JuliaError(str(error)) from None


def _install():
    # XLA turns a handler's error into a JaxRuntimeError, raised from C++ wherever the result is
    # waited for: in the caller's own jitted function, where no code of ours stands. The class of
    # the exception is all that Python can be asked to change, so a report of ours makes the new
    # exception a JuliaError. Whoever catches JaxRuntimeError still catches it.
    plain = JaxRuntimeError.__init__

    def __init__(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        if type(self) is JaxRuntimeError and args and _REPORT.search(str(args[0])):
            self.__class__ = JuliaError

    JaxRuntimeError.__init__ = __init__


_install()
