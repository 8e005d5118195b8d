"""Julia functions as JAX functions: every composition, on both ways in; what is said of bad input."""

import functools

import compositions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compositions import BATCH, JULIA, X, ps, x

import pybridge
from pybridge import JuliaError, julia_function, nested_grad
from pybridge.engines.julia import JuliaFunction


@functools.cache
def function(batch):
    options = {"batch": BATCH} if batch else {}
    return julia_function(JULIA, name="loss", result=jax.ShapeDtypeStruct((), "float64"), **options)


@pytest.fixture(params=["loop", "batch"])
def f(request, border, x64):
    f = function(request.param == "batch")
    f.jet_functions.clear()  # programs compiled for the other way in
    return f


# The callback path runs the same plans: a few of them show that it does.
BOTH_WAYS = ("value", "grad", "grad(vmap)", "vmap one leaf", "grad(scan)")
# Without a vmap a function with a batch form runs the plan of one without.
RUNS = [
    (border, form, name)
    for border in ("ffi", "callback")
    for form in ("loop", "batch")
    for name in compositions.ALL
    if (border == "ffi" or name in BOTH_WAYS) and (form == "loop" or "vmap" in name)
]


@pytest.mark.parametrize(("border", "f", "name"), RUNS, indirect=["border", "f"])
def test_composition(f, name, border):
    compositions.check(name, lambda x, ps: nested_grad(f, x, ps), f)


def test_mixed_derivative_against_central_differences(f):
    def penalty(x, ps):
        return jnp.sum(nested_grad(f, x, ps) ** 3)

    got = jax.jit(jax.grad(penalty, 1))(x, ps)["W"]
    h = 1e-5
    for i in np.ndindex(2, 3):
        step = np.zeros((4, 3))
        step[i] = h
        up, down = (penalty(x, {**ps, "W": ps["W"] + s}) for s in (step, -step))
        np.testing.assert_allclose(got[i], (up - down) / (2 * h), rtol=1e-6)


def test_shared_parameters_of_a_batch_take_one_call_and_one_cotangent(f, julia):
    g = jax.jit(jax.grad(lambda p: jnp.sum(jax.vmap(f, (0, None))(X, p))))
    g(ps)["W"].block_until_ready()
    before = int(julia.ask("CALLS[]"))
    g(ps)["W"].block_until_ready()
    assert int(julia.ask("CALLS[]")) - before == 1


def test_dtypes_are_kept(border):
    f = julia_function("(x, w) -> w .* x.^2")
    y = jax.jit(f)(np.ones(3, "float32"), np.float32(2))
    assert y.dtype == np.float32
    g = jax.grad(lambda x: jnp.sum(f(x, np.float32(2))))(np.ones(3))  # float64 NumPy, 32-bit mode
    assert g.dtype == np.float32
    np.testing.assert_allclose(g, 4)


def test_array_valued_functions_and_integer_leaves(border, x64):
    h = julia_function("(x, ps) -> (y = x[ps.n] .* ps.w, s = sum(x), n = ps.n)", axes="index")
    p = {"w": np.arange(1.0, 4.0), "n": np.int64(2)}
    z = np.array([2.0, 5.0])
    out, back = jax.vjp(h, z, p)
    assert out["n"] == 2
    ct = {"y": np.ones(3), "s": np.float64(10), "n": np.zeros((), jax.dtypes.float0)}
    dx, dp = back(ct)
    np.testing.assert_allclose(dx, [10, 16])
    np.testing.assert_allclose(dp["w"], 5)
    assert dp["n"].dtype == jax.dtypes.float0
    jacobian = jax.jacfwd(lambda z: h(z, p)["y"])(z)
    np.testing.assert_allclose(jacobian, [[0, 1], [0, 2], [0, 3]])
    np.testing.assert_allclose(jacobian, jax.jacrev(lambda z: h(z, p)["y"])(z))


def test_result_by_a_function_of_the_arguments(border):
    f = julia_function("x -> 2 .* x", result=lambda x: x)
    assert jax.jit(jax.vmap(f))(np.ones((3, 2), "f")).shape == (3, 2)


def test_a_callable_from_juliacall(border, julia):
    jl = julia.juliacall.Main
    g = jl.seval("x -> sum(abs2, x)")
    out = jax.grad(lambda x: jnp.sum(nested_grad(g, x) ** 2))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(out, [8, 16])


def test_unwrap_a_julia_closure(julia, x64):
    code = "let w = [1.0 2.0; 3.0 4.0], c = 3.0, n = 2; x -> c * sum((w * x) .^ n) end"
    skeleton, captured = pybridge.unwrap(julia_function(code))
    np.testing.assert_array_equal(captured["w"], [[1, 2], [3, 4]])
    assert set(captured) == {"w"}
    z = np.array([1.0, -1.0])
    assert skeleton(z, captured) == 6
    got = jax.grad(skeleton, 1)(z, captured)["w"]
    np.testing.assert_allclose(got, 6 * np.outer([-1, -1], z))


def test_unwrap_a_python_function_over_a_julia_closure(julia, x64):
    g = julia_function(julia.juliacall.Main.seval("let w = [1.0, 2.0]; x -> sum(w .* x .^ 2) end"))
    skeleton, captured = pybridge.unwrap((lambda g: lambda x: 2 * g(x))(g))
    z = np.array([3.0, -1.0])
    np.testing.assert_array_equal(captured["g"]["w"], [1, 2])
    assert skeleton(z, captured) == 22
    np.testing.assert_allclose(jax.grad(skeleton, 1)(z, captured)["g"]["w"], 2 * z**2)


def test_a_branch_in_a_broadcast_keeps_its_second_derivative(julia, x64):
    f = julia_function("x -> sum(@. ifelse(x > 1, x^3, 0.0)) + sum(ifelse.(x .> 1, x .^ 2, x))")
    z = np.array([0.5, 2.0])
    np.testing.assert_allclose(jax.hessian(f)(z), np.diag([0, 14]))


def test_idle_levels_cost_one_evaluation(border, julia):
    f = julia_function("x -> sum(x)", result=jax.ShapeDtypeStruct((), "float32"))
    y = jax.jit(jax.vmap(lambda i: f(jnp.ones(2)) + i))(jnp.arange(4.0))
    np.testing.assert_array_equal(y, [2, 3, 4, 5])


# ---- bad input --------------------------------------------------------------------------------


def said(code, *args, **options):
    with pytest.raises(Exception) as caught:  # noqa: PT011  which one is asserted by the caller
        julia_function(code, **options)(*args)
    return caught.value


def test_syntax_errors_have_line_and_column(julia):
    error = said("function f(x)\n    sum(x\nend", 1.0, name="broken")
    assert isinstance(error, JuliaError)
    assert "syntax error, line 3, column 1" in str(error) or "line 2, column" in str(error)
    assert "broken" in str(error)


def test_code_that_is_no_function(julia):
    assert "not a function" in str(said("1 + 1", 1.0))


def test_a_missing_field_is_named(julia):
    error = said("(x, ps) -> sum(ps.weight * x)", np.ones(2), {"W": np.ones((2, 2))})
    assert isinstance(error, JuliaError)
    assert "weight" in str(error)


def test_a_package_that_is_not_installed(julia):
    error = said("x -> x", 1.0, using=["NoSuchPackage"])
    assert isinstance(error, JuliaError)
    assert "NoSuchPackage is not installed" in str(error)
    assert "Pkg.add" in str(error)


def test_shapes_that_julia_rejects(border):
    error = said("function (x, W)\n  sum(W * x)\nend", np.ones(3), np.ones((2, 2)), name="product")
    assert isinstance(error, JuliaError)
    assert "DimensionMismatch" in str(error)
    assert error.lines == ["line 2 of product: sum(W * x)"]
    assert len(str(error).splitlines()) < 8


def test_a_loss_that_is_no_scalar(julia):
    with pytest.raises(ValueError, match=r"scalar.*\(3,\)|\(3,\).*scalar"):
        nested_grad(julia_function("x -> 2 .* x"), np.ones(3))


def test_mutation_inside_a_derivative_says_so(julia):
    given = np.ones(3)
    with pytest.raises(
        JuliaError, match=r"outside is unchanged; write.*\sMutating arrays"
    ) as error:
        jax.grad(julia_function("x -> (x .= 2 .* x; sum(x))"))(given)
    assert len(error.value.lines) <= 6
    np.testing.assert_array_equal(given, np.ones(3))


def test_a_julia_capture_that_python_has_no_form_of_is_named_with_a_remedy(julia):
    with pytest.raises(JuliaError, match=r"field `a\.v` is a Vector\{.*tuple by Tuple\(v\)"):
        pybridge.unwrap(julia_function("let a=(v=[[1.0, 2.0]],); x -> sum(a.v[1] .* x) end"))


def test_a_captured_factorization_solves_in_the_dtype_of_its_argument(julia):
    code = "using LinearAlgebra; let W=cholesky([2.0 1.0; 1.0 2.0]); x -> sum(W \\ x) end"
    skeleton, captured = pybridge.unwrap(julia_function(code))
    np.testing.assert_allclose(skeleton(jnp.ones(2), captured), 2 / 3, rtol=1e-5)


def test_a_result_that_is_no_array(julia):
    assert "returned a String" in str(said('x -> "no"', 1.0))


def test_complex_derivatives_are_refused(julia):
    f = julia_function("x -> abs2(x)")
    assert f(1 + 1j) == 2
    with pytest.raises(TypeError, match="complex"):
        jax.grad(f, holomorphic=True)(1 + 1j)


def test_what_is_neither_code_nor_julias():
    with pytest.raises(TypeError, match="Python function needs no Julia"):
        julia_function(lambda x: x)
    with pytest.raises(ValueError, match="'fortran'; accepted are 'index' and 'reversed'"):
        julia_function("x -> x", axes="fortran")


def test_dict_keys_that_are_no_names(julia):
    with pytest.raises(TypeError, match=r"args\[0\] has the key 1"):
        julia_function("x -> 1.0")({1: np.ones(2)})


def test_repr():
    assert repr(JuliaFunction("x -> x", name="f")) == "<Julia function f>"
