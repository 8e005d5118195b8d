"""Who evaluates a function and its derivatives: JAX itself (the embedded default) or Julia."""

ENGINES = ("jax", "julia")


def resolve(f, engine=None, argument="loss"):
    """Who evaluates ``f``: ``(engine, callable)``, with None for JAX itself, which needs no engine.

    A Python callable belongs to JAX; a ``JuliaFunction`` or a callable Julia object (one that came
    from juliacall) to Julia. ``engine`` may insist, never convert.
    """
    if engine not in (None, *ENGINES):
        raise ValueError(
            f"engine={engine!r}: accepted are 'jax', 'julia' and None (by the {argument})."
        )
    julia = as_julia(f)
    if julia is not None:
        if engine == "jax":
            raise TypeError(
                f"{argument} is the Julia function {julia.__name__!r} and engine='jax' was asked for, "
                "but JAX cannot evaluate Julia code. Leave engine out, or write the function in JAX."
            )
        return _julia_engine(), julia
    if not callable(f):
        raise TypeError(
            f"{argument} must be callable, a Python function or a Julia one; it is {f!r} of type "
            f"{type(f).__name__}. Julia code in a string becomes a function by "
            "pybridge.julia_function(code)."
        )
    if engine == "julia":
        raise TypeError(
            f"{argument} is a Python callable and engine='julia' was asked for, but Julia cannot "
            "differentiate Python code. Write it in Julia and pass pybridge.julia_function(code), or "
            "leave engine out: JAX evaluates it, Julia functions called inside it included."
        )
    return None, f


def _julia_engine():
    from pybridge.engines.julia import engine

    return engine


def as_julia(f):
    """``f`` as a ``JuliaFunction``, or None where it has nothing to do with Julia."""
    from pybridge.engines.julia import as_julia_function

    return as_julia_function(f)
