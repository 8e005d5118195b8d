"""What the reverse pass of a loop keeps and computes again: the ways to do it agree, the order and
number of steps are as designed, and memory stays within what is stated."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import bounded_fori_loop, bounded_while_loop
from pybridge._loops import chunks, saving, segments, trajectory

pytestmark = pytest.mark.usefixtures("x64")

# Compiled quickly rather than well, where values alone count.
quick = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


def close(a, b, tol=1e-12):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=tol, atol=tol), a, b)


def rotate(w, x):
    return jnp.tanh(w @ x) + 0.1 * x**2


W = np.array([[0.3, -0.8, 0.2], [0.5, 0.4, -0.1], [0.1, 0.9, -0.4]])
X = np.array([0.7, -0.2, 0.5])


def loss(steps, max_steps, **options):
    def run(w, x):
        cond = lambda c: c[1] < steps
        body = lambda c: (rotate(w, c[0]), c[1] + 1)
        return jnp.sum(jnp.sin(bounded_while_loop(cond, body, (x, 0), max_steps, **options)[0]))

    return run


def plain(steps):
    """The same by ``fori_loop`` with static bounds, which jax differentiates as a scan."""
    return lambda w, x: jnp.sum(jnp.sin(lax.fori_loop(0, steps, lambda _, x: rotate(w, x), x)))


def gradients(fun):
    return quick(jax.grad(fun, (0, 1)))(W, X)


def hvp(fun):
    w, x = jnp.asarray(W), jnp.asarray(X)
    return quick(lambda w, x: jax.jvp(jax.grad(fun, (0, 1)), (w, x), (w, x)))(w, x)


# ---- the ways agree ----


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [0, 1, 2, 13, 30])
def test_checkpoints(slots, steps):
    close(gradients(loss(steps, 30, checkpoints=slots)), gradients(plain(steps)))


def test_checkpoints_to_second_order_and_under_vmap():
    close(hvp(loss(7, 30, checkpoints=2)), hvp(plain(7)))
    twice = lambda fun: quick(jax.hessian(fun, 1))(W, X)
    close(twice(loss(7, 30, checkpoints=2)), twice(plain(7)))
    rev = lambda fun: quick(jax.jacrev(jax.grad(fun, 1), 0))(W, X)
    close(rev(loss(4, 9, checkpoints=2)), rev(plain(4)))
    xs, steps = jnp.stack([X, X * 0.5, -X]), jnp.array([5, 0, 9])
    each = lambda x, n: jax.grad(lambda x: loss(n, 12, checkpoints=2)(W, x))(x)
    theirs = jnp.stack([jax.grad(plain(n), 1)(W, x) for x, n in zip(xs, (5, 0, 9))])
    close(quick(jax.vmap(each))(xs, steps), theirs)
    whole = lambda w: jnp.sum(jax.vmap(lambda x, n: loss(n, 12, checkpoints=2)(w, x))(xs, steps))
    theirs = sum(jax.grad(plain(n), 0)(W, x) for x, n in zip(xs, (5, 0, 9)))
    close(quick(jax.grad(whole))(W), theirs)


@pytest.mark.parametrize("slots", [1, 11])
def test_checkpoints_reverse_over_reverse(slots):
    """By loops within loops: three levels, and two."""
    twice = lambda fun, w, x: jax.jacrev(jax.grad(fun, 1), (0, 1))(w, x)
    ours = quick(lambda steps, w, x: twice(loss(steps, 30, checkpoints=slots), w, x))
    for steps in (0, 1, 11, 30):
        close(ours(steps, W, X), quick(functools.partial(twice, plain(steps)))(W, X), 1e-10)


def test_checkpoints_reverse_over_reverse_under_vmap():
    xs, steps = jnp.stack([X, X * 0.5, -X]), (5, 0, 9)
    each = lambda x, n: jax.jacrev(jax.grad(loss(n, 9, checkpoints=2), 1), 1)(W, x)
    theirs = jnp.stack([jax.hessian(plain(n), 1)(W, x) for x, n in zip(xs, steps)])
    close(quick(jax.vmap(each))(xs, jnp.array(steps)), theirs, 1e-10)


def test_checkpoints_reverse_over_forward_over_reverse():
    def third(fun):
        hvp = lambda x: jax.jvp(lambda x: jax.grad(fun, 1)(W, x), (x,), (x,))[1]
        return quick(jax.grad(lambda x: jnp.sum(hvp(x) ** 2)))(jnp.asarray(X))

    close(third(loss(5, 9, checkpoints=2)), third(plain(5)), 1e-10)


@pytest.mark.parametrize("bound", [1, 2, 9, 30, 512, 4096, 1_000_000, 2**31 - 1])
def test_levels_reach_the_bound_within_the_slots(bound):
    for slots in (1, 3, 64, 2000):
        levels = segments.levels(bound, slots)
        assert math.prod(levels) >= bound
        assert sum(levels) <= max(slots, 4 * math.ceil(bound**0.25))
        assert len(levels) == 1 or bound > slots


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33, 64, 70])
def test_chunks(steps, monkeypatch):
    monkeypatch.setattr(chunks, "pay", lambda *_: True)
    close(gradients(loss(steps, 70)), gradients(plain(steps)))


def test_chunks_to_second_order_and_under_vmap(monkeypatch):
    monkeypatch.setattr(chunks, "pay", lambda *_: True)
    close(hvp(loss(40, 70)), hvp(plain(40)), 1e-10)
    xs, steps = jnp.stack([X, X * 0.5]), jnp.array([40, 3])
    each = lambda x, n: jax.grad(loss(n, 70), (0, 1))(W, x)
    theirs = [jax.grad(plain(n), (0, 1))(W, x) for x, n in zip(xs, (40, 3))]
    close(quick(jax.vmap(each))(xs, steps), jax.tree.map(lambda *v: jnp.stack(v), *theirs))


@pytest.fixture
def ring(monkeypatch):
    """The ring, which serves large weights, with weights that are cheap enough for a test."""
    monkeypatch.setattr(chunks, "heavy", lambda _: 0)
    monkeypatch.setattr(saving, "FREE_BYTES", -1)
    saving._keep.cache_clear()
    yield
    saving._keep.cache_clear()


def test_chunks_and_the_ring_are_for_large_weights_alone():
    text = lambda w, x: str(jax.jit(jax.grad(loss(40, 70))).trace(w, x).jaxpr)
    large, small = (text(jnp.ones((n, n)), jnp.ones(n)) for n in (512, 4))
    assert "any_lane" in large
    assert "any_lane" not in small
    assert "any_lane" not in str(
        jax.jit(jax.grad(loss(8, 32))).trace(jnp.ones((512, 512)), jnp.ones(512)).jaxpr
    )


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33, 64, 70])
def test_the_last_steps_find_their_residuals_in_a_ring(steps, ring):
    assert "any_lane" in str(jax.make_jaxpr(jax.grad(loss(steps, 70)))(W, X))
    close(gradients(loss(steps, 70)), gradients(plain(steps)))


def test_the_ring_to_second_order_and_under_vmap(ring):
    close(hvp(loss(35, 70)), hvp(plain(35)), 1e-10)
    twice = lambda fun: quick(jax.jacrev(jax.grad(fun, 1), 1))(W, X)
    close(twice(loss(35, 70)), twice(plain(35)), 1e-10)
    # Lanes whose last chunks are not the same.
    xs, steps = jnp.stack([X, X * 0.5, -X, X]), (40, 70, 33, 0)
    each = lambda x, n: jax.grad(loss(n, 70), (0, 1))(W, x)
    theirs = [jax.grad(plain(n), (0, 1))(W, x) for x, n in zip(xs, steps)]
    ours = quick(jax.vmap(each))(xs, jnp.array(steps))
    close(ours, jax.tree.map(lambda *v: jnp.stack(v), *theirs))
    whole = lambda w: jnp.sum(jax.vmap(lambda x, n: loss(n, 70)(w, x))(xs, jnp.array(steps)))
    close(quick(jax.grad(whole))(W), jnp.sum(ours[0], 0))


# ---- the schedule ----


@pytest.mark.parametrize("slots", [2, 3, 6])
def test_no_step_is_advanced_more_often_than_the_binomial_bound(slots):
    """Reversing n steps with c slots: none is advanced more than r times, binomial(c+r, c) >= n."""
    for n in (1, 2, 5, 17, 40):
        split_at = jax.jit(trajectory._schedule(slots, 40))
        stack, count, most = [0], np.zeros(n, int), 0
        for i in reversed(range(n)):
            p = stack[-1]
            while p < i:
                target = i
                if len(stack) < slots:
                    target = p + int(split_at(i - p + 1, slots - len(stack) + 1))
                assert p < target <= i
                count[p:target] += 1
                p = target
                if p < i:
                    stack.append(p)
            most = max(most, len(stack))
            if stack[-1] == i and i:
                stack.pop()
        r = next(r for r in range(n + 1) if math.comb(slots + r, slots) >= n)
        assert count.max(initial=0) <= r
        assert most <= slots


def record(log):
    """The identity, with a note of each step forward and in reverse."""
    note = lambda kind: lambda i: log.append((kind, int(i)))

    @jax.custom_vjp
    def mark(x, i):
        return x

    def forward(x, i):
        jax.debug.callback(note("f"), i)
        return x, i

    def backward(i, ct):
        jax.debug.callback(note("b"), i)
        return ct, None

    mark.defvjp(forward, backward)
    return mark


@pytest.mark.parametrize("checkpoints", ["auto", 1, 3])
def test_order_of_the_reverse_steps(checkpoints):
    log = []
    mark = record(log)

    def run(x):
        body = lambda c: (jnp.sin(mark(c[0], c[1])), c[1] + 1)
        return bounded_while_loop(lambda c: c[1] < 5, body, (x, 0), 9, checkpoints=checkpoints)[0]

    jax.jit(jax.grad(run))(1.0).block_until_ready()
    jax.effects_barrier()
    assert [i for kind, i in log if kind == "b"] == [4, 3, 2, 1, 0]
    forward = [i for kind, i in log if kind == "f"]
    assert forward[:5] == [0, 1, 2, 3, 4]


def count_steps(fun, *args):
    """How often the body of a loop runs, by a callback in it."""
    seen = []

    def tick(x):
        return jax.pure_callback(
            lambda x: seen.append(1) or x, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    jax.block_until_ready(jax.jit(fun(tick))(*args))
    return len(seen)


@pytest.mark.parametrize(
    ("checkpoints", "most"),
    [("auto", 2 * 20), (20, 2 * 20), (5, 20 + 20 * 3), (1, 20 + 20 * 21 // 2)],
)
def test_number_of_body_evaluations(checkpoints, most):
    """Once forward; in reverse once where rows are kept, and at most r + 1 times on a schedule."""

    def fun(tick):
        @jax.custom_jvp
        def step(x):
            return jnp.sin(tick(x))

        step.defjvp(lambda x, dx: (step(*x), jnp.cos(tick(x[0])) * dx[0]))
        run = lambda x: bounded_fori_loop(
            0, 20, lambda _, x: step(x), x, max_steps=64, checkpoints=checkpoints
        )
        return jax.grad(run)

    # The rule evaluates tick once for the value and once for the derivative.
    assert 20 <= count_steps(fun, 1.0) <= 2 * most


def test_value_evaluates_cond_once_a_step_and_body_not_past_the_stop():
    seen = {"cond": 0, "body": 0}

    def note(name):
        def add(x):
            seen[name] += 1
            return x

        return lambda x: jax.pure_callback(add, jax.ShapeDtypeStruct((), x.dtype), x)

    run = lambda x: bounded_while_loop(
        lambda x: note("cond")(x) < 5.0, lambda x: note("body")(x) + 1.0, x, 100
    )
    assert jax.jit(run)(0.0) == 5.0
    assert seen == {"cond": 6, "body": 5}


# ---- memory ----


def temporary_bytes(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def big(steps, max_steps, **options):
    body = lambda c: (jnp.sin(c[0]) * 0.999, c[1] + 1)
    return lambda y: jnp.sum(
        bounded_while_loop(lambda c: c[1] < steps, body, (y, 0), max_steps, **options)[0]
    )


def test_ten_thousand_steps_of_a_megabyte_within_64():
    y = jnp.ones(2**17)  # 1 MiB of float64
    assert temporary_bytes(jax.grad(big(10_000, 10_000)), y) < 64 * 2**20
    few = temporary_bytes(jax.grad(big(10_000, 10_000, checkpoints=4)), y)
    assert few < 12 * 2**20


def test_memory_does_not_grow_with_the_bound_beyond_the_budget():
    y = jnp.ones(2**15)
    sizes = [temporary_bytes(jax.grad(big(5, m)), y) for m in (1_000, 10_000, 1_000_000)]
    assert max(sizes) < 1.1 * min(sizes)
    assert max(sizes) < 2 * saving.BUDGET_BYTES


def test_memory_of_reverse_over_reverse_grows_with_the_fourth_root_of_the_bound():
    """It was the bound times the state: 26 GB here."""
    size, bound = 200_000, 4096
    run = lambda x: big(2, bound)(jnp.full(size, x)) / size
    assert temporary_bytes(jax.grad(jax.grad(run)), 0.3) < 20 * bound**0.25 * size * 8


def test_the_budget_is_that_of_all_lanes():
    """vmap(grad) linearises one lane, and then each lane keeps what that plans."""
    xs = jnp.ones((64, 2**10))
    each = jax.grad(big(5, 1_000))
    assert temporary_bytes(jax.vmap(each), xs) < 3 * saving.BUDGET_BYTES
    assert temporary_bytes(jax.vmap(jax.vmap(each)), xs.reshape(8, 8, -1)) < 3 * saving.BUDGET_BYTES
    close(jax.jit(jax.vmap(each))(xs[:2]), jnp.stack([each(x) for x in xs[:2]]))


def test_constants_are_never_rows():
    """jax#8239: weights that a step closes over were stacked once a step by cond in scan."""
    w, x = jnp.ones((200, 200)), jnp.ones(200)
    assert temporary_bytes(jax.grad(loss(8, 64)), w, x) < 4 * w.nbytes


def test_a_leaf_handed_on_unchanged_costs_nothing_in_reverse():
    big_leaf = jnp.ones((100_000,))

    def run(x, y):
        body = lambda c: (jnp.sin(c[0]), c[1], c[2] + 1)
        out = bounded_while_loop(lambda c: c[2] < 8, body, (x, y, 0), 64)
        return out[0] + jnp.sum(out[1])

    jaxpr = str(jax.jit(jax.grad(run, (0, 1))).trace(1.0, big_leaf).jaxpr)
    loops = jaxpr.split("bounded_loop[")[1:]
    assert len(loops) == 2
    assert all("100000" not in loop.split("] ")[0] for loop in loops)
    close(jax.jit(jax.grad(run, 1))(1.0, big_leaf), jnp.ones_like(big_leaf))


def test_unwanted_parts_of_the_carry_are_not_computed():
    def run(x, y):
        body = lambda c: (jnp.sin(c[0]), jnp.cos(c[1]), c[2] + 1)
        return bounded_while_loop(lambda c: c[2] < 8, body, (x, y, 0), 64)[0]

    jaxpr = str(jax.make_jaxpr(lambda x, y: jax.jit(run)(x, y))(1.0, 2.0))
    compiled = jax.jit(run).lower(1.0, 2.0).compile().as_text()
    assert "cos" in jaxpr
    assert "cosine" not in compiled


# ---- rows of a buffer, written in place ----


def write_rows(buffer, x, steps, max_steps, read=False):
    def body(c):
        buffer, x, i = c
        x = jnp.sin(x) * 1.1
        if read:
            x = x + 0.1 * buffer[i - 1] + 0.05 * lax.dynamic_index_in_dim(buffer, i, keepdims=False)
        return buffer.at[i].set(x), x, i + 1

    return bounded_while_loop(lambda c: c[2] < steps, body, (buffer, x, 0), max_steps)[0]


@pytest.mark.parametrize("read", [False, True])
def test_rows_are_written_without_copies_of_the_buffer(read):
    """jax#13522, jax#10197, jax#15906, jax#17640: a loop that updates one row copied them all."""
    n, d = 5_000, 8
    buffer, x = jnp.zeros((n, d)), jnp.linspace(0, 1, d)

    def whole(buffer, x):
        return jnp.sum(jnp.cos(write_rows(buffer, x, 7, n, read)[:9]))

    for fun in (whole, jax.grad(whole, (0, 1))):
        text = jax.jit(fun).lower(buffer, x).compile().as_text()
        inside = [part for part in text.split("\n\n") if "body" in part.split("\n")[0]]
        inside = inside or [part for part in text.split("\n\n") if "ENTRY" not in part]
        copies = [
            line
            for part in inside
            for line in part.split("\n")
            if f"[{n},{d}]" in line and " copy(" in line
        ]
        assert not copies, copies


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_gradients_through_rows(read, steps, monkeypatch):
    from pybridge._loops import rows

    buffer, x = jnp.linspace(-1, 1, 12).reshape(6, 2), jnp.array([0.3, 0.7])

    def theirs(buffer, x):
        for i in range(steps):
            x = jnp.sin(x) * 1.1
            if read:
                x = x + 0.1 * buffer[i - 1] + 0.05 * buffer[i]
            buffer = buffer.at[i].set(x)
        return buffer

    weigh = lambda out: jnp.sum(jnp.sin(out * (1 + jnp.arange(12).reshape(6, 2))))
    ours = lambda buffer, x: weigh(write_rows(buffer, x, steps, 6, read))
    for large in (rows.LARGE_BYTES, 0):
        monkeypatch.setattr(rows, "LARGE_BYTES", large)
        rows._writes_rows.cache_clear()
        close(
            jax.jit(lambda b, x: jax.value_and_grad(ours, (0, 1))(b, x))(buffer, x),
            jax.value_and_grad(lambda b, x: weigh(theirs(b, x)), (0, 1))(buffer, x),
        )
    rows._writes_rows.cache_clear()


def test_overwritten_cells_of_an_initial_buffer_get_no_gradient():
    """equinox's in-place buffers give [1, 1, 1] here: two of three cells are overwritten."""

    def run(buffer):
        body = lambda c: (c[0].at[c[1]].set(2.0), c[1] + 1)
        return jnp.sum(bounded_while_loop(lambda c: c[1] < 2, body, (buffer, 0), 4)[0])

    close(jax.grad(run)(jnp.ones(3)), jnp.array([0.0, 0.0, 1.0]))


def test_cells_written_twice():
    where = jnp.array([1, 1, 0, 1])

    def run(buffer, x):
        def body(c):
            buffer, i = c
            return buffer.at[where[i]].set(buffer[where[i]] * x + i), i + 1

        return jnp.sum(bounded_while_loop(lambda c: c[1] < 4, body, (buffer, 0), 8)[0] ** 2)

    def theirs(buffer, x):
        for i in range(4):
            j = int(where[i])
            buffer = buffer.at[j].set(buffer[j] * x + i)
        return jnp.sum(buffer**2)

    args = jnp.array([0.5, -0.7, 2.0]), jnp.float64(1.3)
    close(quick(jax.grad(run, (0, 1)))(*args), jax.grad(theirs, (0, 1))(*args))
    close(quick(jax.hessian(run))(*args), jax.hessian(theirs)(*args))
