"""The Julia side of a crosscheck, where there is a Julia."""

import os


class Julia:
    """What the suites call: functions written in Julia, and the twins by name."""

    def __init__(self, version):
        self.version = version
        self._functions = {}

    def function(self, code, *, using=(), name=None):
        """``code`` as a ``pybridge.julia_function``, one a text."""
        from pybridge.engines.julia import julia_function

        key = (code, tuple(using))
        if key not in self._functions:
            self._functions[key] = julia_function(code, using=using, name=name)
        return self._functions[key]

    def packages(self, *names) -> dict[str, str]:
        """The versions of the named packages, of those that are loaded."""
        from pybridge.julia.runtime import runtime

        answer = runtime().ask(
            "join([string(key.name, '=', pkgversion(mod)) for (key, mod) in Base.loaded_modules], ' ')"
        )
        versions = dict(entry.split("=") for entry in answer.split())
        return {name: versions[name] for name in names if name in versions}


def live_julia():
    """``(Julia, "")``, or ``(None, why)`` where there is none or ``PYBRIDGE_CROSSCHECK=jax``."""
    from pybridge.julia import find
    from pybridge.julia.errors import JuliaNotFoundError

    if os.environ.get("PYBRIDGE_CROSSCHECK") == "jax":
        return None, "left out by PYBRIDGE_CROSSCHECK=jax"
    try:
        found = find.find()
    except JuliaNotFoundError as error:
        return None, str(error).splitlines()[0].rstrip(".")
    return Julia(found.version), ""
