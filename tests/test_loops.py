"""Values and derivatives of bounded loops, to any order and under any nesting of transformations.

The reference is a plain Python loop, differentiated by jax as straight-line code, and central
differences where the loop itself is what is in question.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import bounded_fori_loop, bounded_scan_until, bounded_while_loop
from pybridge._loops import saving

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def keeping(request, monkeypatch):
    """How residuals reach the reverse pass: by states, or as the test's parameter says."""
    how = getattr(request, "param", "states")
    monkeypatch.setattr(saving, "FREE_BYTES", {"residuals": 2**40, "states": -1}[how])
    saving._keep.cache_clear()
    yield how
    saving._keep.cache_clear()


both_ways = pytest.mark.parametrize("keeping", ["residuals", "states"], indirect=True)


def rotate(w, x):
    """Steps whose Jacobians do not commute, and whose gradients do not vanish."""
    return jnp.tanh(w @ x) + 0.1 * x**2


def loop(w, x, steps, max_steps=10):
    """``steps`` steps of ``rotate``, with a counter in the carry."""
    cond = lambda c: c[1] < steps
    return bounded_while_loop(cond, lambda c: (rotate(w, c[0]), c[1] + 1), (x, 0), max_steps)[0]


def plain(w, x, steps):
    for _ in range(steps):
        x = rotate(w, x)
    return x


def scalar(fun):
    return lambda w, x, *rest: jnp.sum(jnp.sin(fun(w, x, *rest)))


@pytest.fixture
def point():
    w = jnp.array([[0.3, -0.8, 0.2], [0.5, 0.4, -0.1], [0.1, 0.9, -0.4]])
    return w, jnp.array([0.7, -0.2, 0.5])


def same(ours, theirs, *args, tol=1e-12):
    """Both functions give the same, each compiled as one, and quickly rather than well."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    run = lambda fun: jax.jit(fun, compiler_options=quick)(*args)
    close(run(ours), run(theirs), tol)


def close(a, b, tol=1e-12):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=tol, atol=tol), a, b)


def central(fun, x, h=1e-5):
    """The gradient of a scalar function by central differences, written out."""
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        e = np.zeros_like(x)
        e[i] = h
        out[i] = (fun(jnp.asarray(x + e)) - fun(jnp.asarray(x - e))) / (2 * h)
    return out


# ---- one loop, every transformation ----

TRANSFORMS = {
    "value": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "grad checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w * 2, x + 1)),
    "jvp in x": lambda f: lambda w, x: jax.jvp(lambda x: f(w, x), (x,), (x + 1,)),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](jnp.float64(2.0)),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w * 2, x),
    "linear_transpose": lambda f: (
        lambda w, x: jax.linear_transpose(lambda v: jax.jvp(lambda x: f(w, x), (x,), (v,))[1], x)(
            jnp.float64(1.5)
        )
    ),
    "hvp fwd-rev": lambda f: lambda w, x: jax.jvp(jax.grad(f, (0, 1)), (w, x), (w, x)),
    "hvp rev-fwd": lambda f: (
        lambda w, x: jax.grad(lambda w, x: jax.jvp(f, (w, x), (w + 1, x))[1], (0, 1))(w, x)
    ),
    "hvp rev-rev": lambda f: (
        lambda w, x: jax.grad(
            lambda w, x: sum(jnp.vdot(a, b) for a, b in zip(jax.grad(f, (0, 1))(w, x), (w, x))),
            (0, 1),
        )(w, x)
    ),
    "third order": lambda f: jax.jacrev(jax.jacfwd(jax.grad(f, 1), 1), 1),
    "third order reverse": lambda f: jax.jacrev(jax.jacrev(jax.grad(f, 1), 1), 1),
}


@both_ways
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name, point, keeping):
    make = TRANSFORMS[name]
    ours = scalar(functools.partial(loop, steps=4))
    theirs = scalar(functools.partial(plain, steps=4))
    same(make(ours), make(theirs), *point)


@pytest.mark.parametrize("name", ["value", "grad", "hvp fwd-rev", "linearize"])
def test_transform_without_jit(name, point):
    make = TRANSFORMS[name]
    ours, theirs = (scalar(functools.partial(f, steps=3)) for f in (loop, plain))
    close(make(ours)(*point), make(theirs)(*point))


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_hessian_in_all_four_combinations(outer, inner, point):
    hessian = lambda f: outer(inner(scalar(functools.partial(f, steps=3)), (0, 1)), (0, 1))
    same(hessian(loop), hessian(plain), *point)


@both_ways
def test_gradient_by_central_differences(point, keeping):
    w, x = point
    fun = jax.jit(scalar(functools.partial(loop, steps=5)))
    dw, dx = jax.grad(fun, (0, 1))(w, x)
    close(dw, central(lambda w: fun(w, x), w), 1e-8)
    close(dx, central(lambda x: fun(w, x), x), 1e-8)


# ---- vmap ----


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


STEPS = np.array([0, 3, 1, 4])


@pytest.fixture
def lanes(point):
    return jnp.stack([point[1] * s for s in (1.0, -0.5, 2.0, 0.9)])


def total(fun, mapped):
    """The sum over lanes of a loop mapped by vmap, against the same lane by lane in Python."""

    def each(w, xs):
        if mapped:
            return jnp.sum(jax.vmap(scalar(fun), (None, 0, 0))(w, xs, STEPS))
        return sum(scalar(fun)(w, x, int(k)) for x, k in zip(xs, STEPS))

    return each


@pytest.mark.parametrize("name", ["value", "grad", "grad checkpoint", "jvp", "hvp fwd-rev"])
def test_transform_of_vmap_with_stops_that_differ(name, point, lanes, keeping):
    make = TRANSFORMS[name]
    same(make(total(loop, True)), make(total(plain, False)), point[0], lanes)


@pytest.mark.parametrize(
    "name", ["value", "grad", "jvp", "hvp fwd-rev", "hvp rev-rev", "linearize"]
)
def test_vmap_of_transform_with_stops_that_differ(name, point, lanes, keeping):
    make = TRANSFORMS[name]
    w = point[0]
    at = lambda fun, k: make(scalar(lambda w, x: fun(w, x, k)))
    ours = lambda xs: jax.vmap(lambda x, k: at(loop, k)(w, x))(xs, STEPS)
    theirs = lambda xs: stack(at(plain, int(k))(w, x) for x, k in zip(xs, STEPS))
    same(ours, theirs, lanes)


def test_vmap_over_weights_and_twice(point, lanes):
    w, _ = point
    ws = jnp.stack([w, w.T])
    each = lambda fun: jax.grad(scalar(lambda w, x, k: fun(w, x, k)), (0, 1))
    ours = jax.vmap(jax.vmap(each(loop), (None, 0, 0)), (0, None, None))
    theirs = lambda ws, xs, _: stack(
        stack(each(plain)(w, x, int(k)) for x, k in zip(xs, STEPS)) for w in ws
    )
    same(ours, theirs, ws, lanes, STEPS)


def test_vmap_with_one_stop_keeps_the_length_shared(point, lanes):
    w = point[0]
    mapped = jax.vmap(
        lambda x: bounded_while_loop(
            lambda c: c[1] < 4, lambda c: (rotate(w, c[0]), c[1] + 1), (x, 0), 9, return_steps=True
        ),
        out_axes=((0, None), None),
    )
    (xs, i), steps = mapped(lanes)
    assert i == steps == 4
    close(xs, jax.vmap(lambda x: plain(w, x, 4))(lanes))


# ---- inside other control flow ----


def test_inside_scan_cond_checkpoint_and_itself(point, keeping):
    w, x = point

    def inside(fun):
        def outer(w, x):
            step = lambda x, k: (lax.cond(k > 1, lambda x: fun(w, x, k), lambda x: x * 2.0, x), k)
            return lax.scan(step, x, jnp.array([0, 3, 2]))[0]

        return outer

    def unrolled(w, x):
        return plain(w, plain(w, x * 2.0, 3), 2)

    ours = scalar(jax.checkpoint(inside(loop)))
    for make in (TRANSFORMS["grad"], TRANSFORMS["hvp rev-rev"]):
        same(make(ours), make(scalar(unrolled)), w, x)

    def nested(w, x):
        body = lambda c: (loop(w, c[0], c[1] + 1), c[1] + 1)
        return bounded_while_loop(lambda c: c[1] < 3, body, (x, 0), 5)[0]

    def nested_plain(w, x):
        return plain(w, x, 1 + 2 + 3)

    for make in (TRANSFORMS["grad"], TRANSFORMS["hvp fwd-rev"]):
        same(make(scalar(nested)), make(scalar(nested_plain)), w, x)


@pytest.mark.parametrize(
    ("policy", "runs"),
    [(None, 2), (jax.checkpoint_policies.everything_saveable, 1)],
    ids=["run again", "saved"],
)
def test_a_loop_that_does_not_depend_on_the_argument_of_a_checkpoint(policy, runs):
    w, y = 0.5, 0.7
    start = jnp.asarray(y)
    still = lambda: bounded_fori_loop(0, 3, lambda _, c: jnp.sin(c) + w, start, 5)
    slope = jax.grad(jax.checkpoint(lambda x: jnp.sin(still() * x), policy=policy))
    for _ in range(3):
        y = np.sin(y) + w
    close(slope(0.4), y * np.cos(y * 0.4))
    assert str(jax.make_jaxpr(slope)(0.4)).count("bounded_loop[") == runs


def test_grad_inside_scan_inside_vmap(point, lanes, keeping):
    w = point[0]

    def descend(fun):
        def run(x, k):
            step = lambda x, _: (x - 0.1 * jax.grad(scalar(fun), 1)(w, x, k), None)
            return lax.scan(step, x, None, length=3)[0]

        return run

    ours = lambda xs: jax.vmap(descend(loop))(xs, STEPS)
    theirs = lambda xs: jnp.stack([descend(plain)(x, int(k)) for x, k in zip(xs, STEPS)])
    both = lambda fun: jax.value_and_grad(lambda xs: jnp.sum(fun(xs)))
    same(both(ours), both(theirs), lanes)


def test_vmap_of_cond_on_shared_weights(point, lanes):
    w = point[0]
    which = STEPS > 2

    def pick(fun):
        return lambda w, x, k, p: jnp.sum(
            lax.cond(p, lambda: fun(w, x, k), lambda: jnp.cos(x)) if fun is loop else fun(w, x, k)
        )

    ours = lambda w: jnp.sum(jax.vmap(pick(loop), (None, 0, 0, 0))(w, lanes, STEPS, which))
    theirs = lambda w: sum(
        jnp.sum(plain(w, x, int(k))) if p else jnp.sum(jnp.cos(x))
        for x, k, p in zip(lanes, STEPS, which)
    )
    same(jax.value_and_grad(ours), jax.value_and_grad(theirs), w)
    per_lane = lambda w: jax.vmap(jax.grad(pick(loop)), (None, 0, 0, 0))(w, lanes, STEPS, which)
    same(lambda w: jnp.sum(per_lane(w), 0), jax.grad(theirs), w)


# ---- what may be closed over, and what may be carried ----


@both_ways
def test_closures_over_tracers_used_by_body_and_cond(keeping):
    # The stop depends on a, and so does the body: Newton's method for the square root.
    def root(a):
        far = lambda x: abs(x * x - a) > 1e-13 * a
        return bounded_while_loop(far, lambda x: 0.5 * (x + a / x), a, 60)

    many = jnp.array([2.0, 9.0, 0.3])
    first, second = 0.5 * many**-0.5, -0.25 * many**-1.5
    close(root(9.0), 3.0)
    close(jax.jit(jax.grad(root))(9.0), 1 / 6, 1e-10)
    close(jax.jit(jax.vmap(jax.grad(root)))(many), first, 1e-10)
    close(jax.jit(jax.grad(lambda a: jnp.sum(jax.vmap(root)(a))))(many), first, 1e-10)
    close(jax.jit(jax.vmap(jax.grad(jax.grad(root))))(many), second, 1e-9)


def test_closure_over_a_module():
    net = eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0))
    x = jnp.array([0.3, -0.1])

    def run(net, x, bounded):
        if bounded:
            body = lambda c: (net(c[0]), c[1] + 1)
            return jnp.sum(bounded_while_loop(lambda c: c[1] < 3, body, (x, 0), 7)[0])
        return jnp.sum(net(net(net(x))))

    grad = lambda bounded: eqx.filter_jit(eqx.filter_grad(lambda n: run(n, x, bounded)))(net)
    close(*(eqx.filter(grad(bounded), eqx.is_array) for bounded in (True, False)))


def test_carry_of_integers_booleans_and_keys(point, keeping):
    w, x = point

    def body(c):
        key, sub = jax.random.split(c["key"])
        x = jnp.where(c["flip"], rotate(w, c["x"]), c["x"] * 0.5) + jax.random.normal(sub, (3,))
        return {"x": x, "key": key, "i": c["i"] + jnp.int32(1), "flip": ~c["flip"], "none": None}

    def init(x, key):
        return {"x": x, "key": key, "i": jnp.int32(0), "flip": jnp.bool_(True), "none": None}

    def ours(x, key):
        return bounded_while_loop(lambda c: c["i"] < 3, body, init(x, key), 5)

    def theirs(x, key):
        c = init(x, key)
        for _ in range(3):
            c = body(c)
        return c

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        a, b = jax.jit(ours)(x, key), jax.jit(theirs)(x, key)
        assert a["key"].dtype == key.dtype
        close((a["x"], a["i"], a["flip"]), (b["x"], b["i"], b["flip"]))
        grad = lambda fun, key=key: jax.grad(lambda x: jnp.sum(fun(x, key)["x"] ** 2))
        same(grad(ours), grad(theirs), x)
    keys = jax.random.split(jax.random.key(0), 4)
    same(
        jax.vmap(lambda k: ours(x, k)["x"]),
        lambda keys: jnp.stack([theirs(x, k)["x"] for k in keys]),
        keys,
    )


def test_a_number_in_the_carry_takes_the_type_of_the_body():
    out = bounded_while_loop(lambda x: x < 5, lambda x: x + jnp.float32(1.5), 0, 9)
    assert out.dtype == jnp.float32
    assert out == 6.0
    weak = bounded_while_loop(lambda x: x < 5, lambda x: x * 2.0, 1.0, 9)
    assert weak == 8.0


def test_complex_carry(keeping):
    a = jnp.array(0.3 + 0.4j)
    body = lambda a: lambda c: (jnp.sin(a * c[0]) + c[0] ** 2 / 4, c[1] + 1)

    def ours(a):
        return bounded_while_loop(lambda c: c[1] < 3, body(a), (a + 1, 0), 6)[0]

    def theirs(a):
        c = (a + 1, 0)
        for _ in range(3):
            c = body(a)(c)
        return c[0]

    same(*(jax.grad(fun, holomorphic=True) for fun in (ours, theirs)), a)
    same(*(jax.grad(lambda a, fun=fun: jnp.abs(fun(a))) for fun in (ours, theirs)), a)


# ---- fori and scan_until ----


def test_fori_with_traced_bounds(point, keeping):
    w, x = point
    ours = lambda w, x, lo, hi: bounded_fori_loop(lo, hi, lambda i, x: rotate(w * i, x), x, 8)

    def theirs(w, x, lo, hi):
        for i in range(lo, hi):
            x = rotate(w * i, x)
        return x

    grad = jax.jit(jax.grad(scalar(ours), (0, 1)))
    for lo, hi in ((0, 4), (-2, 3), (3, 3), (5, 2)):
        plain_grad = jax.grad(scalar(lambda w, x, lo=lo, hi=hi: theirs(w, x, lo, hi)), (0, 1))
        close(grad(w, x, lo, hi), jax.jit(plain_grad)(w, x))
    out, steps = bounded_fori_loop(0, 20, lambda i, x: x + i, 0, 8, return_steps=True)
    assert (out, steps) == (28, 8)


def test_fori_with_static_bounds_needs_no_limit(point):
    w, x = point
    ours = lambda w, x: bounded_fori_loop(0, np.int64(3), lambda i, x: rotate(w, x), x)
    same(jax.grad(scalar(ours)), jax.grad(scalar(lambda w, x: plain(w, x, 3))), w, x)


@both_ways
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_scan_until(stop, point, keeping):
    w, x = point

    def ours(w, x):
        body = lambda c: ((rotate(w, c[0]), c[1] + 1), {"x": c[0], "i": c[1]})
        ((x, _), ys), n = bounded_scan_until(
            lambda c: c[1] < stop, body, (x, 0), 6, return_steps=True
        )
        return x, ys, n

    def theirs(w, x):
        rows = []
        for _ in range(stop):
            rows.append(x)
            x = rotate(w, x)
        return x, jnp.stack(rows + [jnp.zeros(3)] * (6 - stop))

    x_out, ys, n = jax.jit(ours)(w, x)
    assert n == stop
    close((x_out, ys["x"]), theirs(w, x))
    close(ys["i"], jnp.where(jnp.arange(6) < stop, jnp.arange(6), 0))
    loss = lambda x, ys: jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(3 * ys))
    picked = lambda x, ys, n: loss(x, ys["x"])
    same(
        jax.grad(lambda w, x: picked(*ours(w, x)), (0, 1)),
        jax.grad(lambda w, x: loss(*theirs(w, x)), (0, 1)),
        w,
        x,
    )


# ---- random compositions ----


@pytest.mark.parametrize("seed", range(6))
def test_random_composition(seed, point, lanes):
    """A few transformations in a row, the same for the loop and for straight-line code."""
    rng = np.random.default_rng(seed)
    w = point[0]
    wraps = {
        "grad": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x),
        "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
        "jit": lambda f: jax.jit(f),
        "vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, x * 0.5])), 0),
        "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.sin(x)),
        "checkpoint": lambda f: jax.checkpoint(f),
        "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c) * 0.5, None), x, None, length=2)[0],
        "cond": lambda f: lambda x: lax.cond(x[0] > -9.0, f, lambda x: x, x),
    }
    names = list(rng.choice(list(wraps), size=4))
    names = [
        n for i, n in enumerate(names) if not (n in ("grad", "jvp") and names[:i].count(n) > 1)
    ]
    steps = int(rng.integers(0, 5))
    ours, theirs = (lambda x: loop(w, x, steps, 5)), (lambda x: plain(w, x, steps))
    for name in names:
        ours, theirs = wraps[name](ours), wraps[name](theirs)
    same(ours, theirs, point[1], tol=1e-10)
