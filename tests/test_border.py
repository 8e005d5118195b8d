"""The border itself: shapes and order, crossings, memory, errors, the FFI's structs."""

import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pybridge import JuliaError, julia_function, nested_grad
from pybridge.julia.errors import julia_errors

DTYPES = ["bool", "int32", "int64", "float32", "float64", "complex64", "complex128"]
SHAPES = [(), (0,), (1,), (5,), (3, 4), (0, 3), (2, 1, 3), (2, 3, 1, 2), (1, 2, 2, 1, 3), (2,) * 6]


@pytest.fixture
def calls(julia):
    return lambda: int(julia.ask("CALLS[]"))


def values(shape, dtype):
    n = np.arange(int(np.prod(shape, dtype=int)))
    if dtype == "bool":
        return (n % 3 == 0).reshape(shape)
    x = (n - 2).astype(dtype)
    return (x * (1 + 2j) if dtype.startswith("c") else x).reshape(shape).astype(dtype)


@pytest.mark.parametrize("axes", ["index", "reversed"])
def test_every_dtype_and_rank_goes_over_and_back(border, x64, axes):
    back = julia_function("x -> map(identity, x)", axes=axes, result=lambda x: x)
    # Every dtype at one rank, every rank at one dtype: Julia compiles for each pair.
    pairs = [(dtype, (2, 3)) for dtype in DTYPES] + [("float64", shape) for shape in SHAPES]
    for dtype, shape in pairs:
        x = values(shape, dtype)
        y = jax.jit(back)(x)
        assert y.dtype == dtype
        assert y.shape == shape
        np.testing.assert_array_equal(y, x)


def test_index_order_is_kept(border):
    x = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    pick = julia_function("x -> x[2, 1, 3] + 100 * size(x, 3)")
    assert jax.jit(pick)(x) == x[1, 0, 2] + 400
    turned = julia_function("x -> x[3, 1, 2] + 100 * size(x, 1)", axes="reversed")
    assert jax.jit(turned)(x) == x[1, 0, 2] + 400


def test_index_order_of_results_and_samples(border):
    f = julia_function("x -> [10i + j + x[i] for i in 1:2, j in 1:3]")
    x = np.array([[100.0, 200.0], [300.0, 400.0], [500.0, 600.0]], np.float32)
    right = x[:, :, None] + np.array([[11, 12, 13], [21, 22, 23]])
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x), right)
    np.testing.assert_array_equal(jax.vmap(f, out_axes=2)(x), right.transpose(1, 2, 0))


def test_structures_of_arguments_and_results(border, x64):
    code = """
    function (x, ps, none, s)
        none === nothing && ps.list isa Tuple && s isa Float64 || error("not so")
        (a = x .+ ps.list[1], rest = (ps.k, nothing, sum(ps.list[2])), n = s)
    end
    """
    x, ps = np.ones(2), {"list": [np.ones(2), np.full((2, 2), 3.0)], "k": np.int64(7)}
    out = jax.jit(julia_function(code))(x, ps, None, 0.5)
    assert out["rest"] == (7, None, 12.0)
    assert out["n"] == 0.5
    assert out["a"].tolist() == [2.0, 2.0]


def test_key_leaves_arrive_as_their_data(border):
    key = jax.random.key(3)
    f = julia_function("(k, x) -> x * k[2]")
    assert jax.jit(f)(key, 2.0) == 2 * jax.random.key_data(key)[1]


def test_a_float16_result_of_an_int_and_an_unknown_dtype(border):
    assert jax.jit(julia_function("x -> Float16(x)"))(3).dtype == np.float16
    with pytest.raises(TypeError, match="bfloat16"):
        julia_function("x -> x")(jnp.ones(2, jnp.bfloat16))


# ---- one crossing -----------------------------------------------------------------------------


def test_a_batch_is_one_crossing(border, calls):
    f = julia_function("x -> sum(abs2, x)", result=jax.ShapeDtypeStruct((), "float32"))
    x = np.random.default_rng(0).normal(size=(7, 5, 3)).astype("f")
    call = jax.jit(jax.vmap(jax.vmap(f)))
    call(x).block_until_ready()
    before = calls()
    y = call(x)
    np.testing.assert_allclose(y, np.sum(x**2, -1), rtol=1e-6)
    assert calls() - before == 1


def test_a_new_batch_size_compiles_nothing_in_julia(border, julia):
    f = julia_function("x -> sum(abs2, x)", result=jax.ShapeDtypeStruct((), "float32"))
    count = "count(!isnothing, Base.specializations(only(methods(run_sample))))"
    jax.jit(jax.vmap(f))(np.ones((3, 4), "f")).block_until_ready()
    before = julia.ask(count)
    jax.jit(jax.vmap(f))(np.ones((9, 6), "f")).block_until_ready()
    assert julia.ask(count) == before


def test_threads_change_no_bit(julia):
    code = "(x, w) -> sum(sin.(x .* w))"
    x = np.random.default_rng(0).normal(size=(203, 5)).astype("f")
    w = np.linspace(0.5, 2, 5, dtype="f")

    def sums(threads):
        f = julia_function(code, threads=threads)
        g = jax.grad(lambda w: jnp.sum(jax.vmap(f, (0, None))(x, w)))
        return np.asarray(jax.jit(g)(w))

    once = sums(True)
    np.testing.assert_array_equal(once, sums(True))
    np.testing.assert_allclose(once, sums(False), rtol=1e-5)


# ---- memory -----------------------------------------------------------------------------------


def test_a_function_that_changes_its_argument_changes_a_copy(border):
    f = julia_function("x -> (x .= 0; sum(x))")
    x = jnp.arange(6.0).reshape(2, 3)
    assert jax.jit(f)(x) == 0
    np.testing.assert_array_equal(x, np.arange(6.0).reshape(2, 3))
    both = jax.jit(lambda x: (f(x), jnp.sum(x)))(x)
    assert both == (0.0, 15.0)


def test_a_kept_argument_reads_no_freed_memory(border, julia):
    code = "const kept = Any[]; x -> (push!(kept, x); length(kept) > 1 ? sum(kept[1]) : sum(x))"
    f = jax.jit(julia_function(code, result=jax.ShapeDtypeStruct((), "float32")))
    first = jnp.full(1000, 3.0)
    assert f(first) == 3000
    del first
    for n in range(20):
        jnp.full(1000, float(n)).block_until_ready()
    assert f(jnp.zeros(1000)) == 3000


def test_a_donated_buffer_is_not_written(border):
    f = julia_function("x -> (x .+= 1; 2 .* x)")
    x = jnp.arange(4.0)
    y, z = jax.jit(lambda x: (f(x), x * 1), donate_argnums=0)(x)
    np.testing.assert_array_equal(y, [2, 4, 6, 8])
    np.testing.assert_array_equal(z, [0, 1, 2, 3])


def test_functions_and_plans_are_given_back(julia):
    import gc

    plans = "count(!isnothing, PLANS.plans)"
    functions = "length(FUNCTIONS)"
    jax.clear_caches()
    gc.collect()
    before = (int(julia.ask(plans)), int(julia.ask(functions)))
    for _ in range(5):
        jax.jit(julia_function("x -> x + 1"))(1.0).block_until_ready()
    jax.clear_caches()
    gc.collect()
    julia.ask("0")
    assert int(julia.ask(plans)) <= before[0] + 1
    assert int(julia.ask(functions)) <= before[1] + 1


def test_a_compiled_program_keeps_its_function(border):
    import gc

    call = jax.jit(julia_function("x -> 2x")).lower(1.0).compile()
    jax.clear_caches()
    gc.collect()
    for _ in range(3):
        jax.jit(julia_function("x -> 3x"))(1.0).block_until_ready()
    assert call(4.0) == 8


# ---- errors -----------------------------------------------------------------------------------


def test_an_exception_becomes_a_julia_error_and_the_next_call_works(border):
    code = "function (x)\n    y = x .- 1\n    sum(sqrt.(y))\nend"
    f = jax.jit(julia_function(code, name="roots", result=jax.ShapeDtypeStruct((), "float32")))
    with pytest.raises(JuliaError) as caught:
        f(jnp.array([5.0, 0.0])).block_until_ready()
    error = caught.value
    assert isinstance(error, jax.errors.JaxRuntimeError)
    assert error.function == "roots"
    assert error.message.startswith("DomainError with -1.0")
    assert error.lines == ["line 3 of roots: sum(sqrt.(y))"]
    assert len(str(error).splitlines()) < 10
    assert f(jnp.array([5.0, 2.0])) == 3


def test_many_errors_leave_the_process_well(border):
    f = julia_function('x -> x < 0 ? error("no ", x) : x', result=jax.ShapeDtypeStruct((), "f"))
    f = julia_errors()(jax.jit(f))
    for n in range(20):
        if n % 2:
            with pytest.raises(JuliaError, match="no -1"):
                f(-1.0).block_until_ready()
        else:
            assert f(float(n)) == n


def test_wherever_the_error_arises_it_is_a_julia_error(border):
    f = julia_function(
        'x -> sum(x) < 0 ? error("no ", 1) : sum(x .^ 2)', result=jax.ShapeDtypeStruct((), "f")
    )
    steps = lambda x: jax.lax.scan(lambda c, _: (c * 1.01 + f(c), None), x, None, length=3)[0]
    calls = [f, jax.grad(f), lambda x: nested_grad(f, x), lambda x: jax.vmap(f)(x[None]), steps]
    calls += [julia_errors()(jax.jit(call)) for call in calls]
    if border == "ffi":
        # Dispatched asynchronously, as it has work beside Julia's: no need of `julia_errors`.
        calls.append(jax.jit(lambda x: f(x) + jnp.sum(jnp.outer(x, x) @ jnp.ones((4, 400)))))
    for call in calls:
        for _ in range(2):
            jax.block_until_ready(call(jnp.ones(4)))
            with pytest.raises(JuliaError, match="no 1"):
                jax.block_until_ready(call(-jnp.ones(4)))


def test_jax_itself_makes_a_value_error_of_it_on_its_fast_path(border):
    f = jax.jit(julia_function('x -> x < 0 ? error("no ", x) : x'))
    f(1.0).block_until_ready()
    with pytest.raises((ValueError, JuliaError), match="no -1"):
        f(-1.0).block_until_ready()
    with pytest.raises(JuliaError, match="no -1"), julia_errors():
        f(-1.0).block_until_ready()


def test_a_result_of_another_shape_than_declared(border):
    f = julia_function("x -> x[1:2]", result=jax.ShapeDtypeStruct((3,), "float32"))
    with pytest.raises(JuliaError, match=r"size \(2,\).*size \(3,\).*result="):
        jax.jit(f)(jnp.ones(4)).block_until_ready()


def test_without_jit(border):
    f = julia_function("x -> sum(x .^ 2)")
    with jax.disable_jit():
        np.testing.assert_array_equal(jax.grad(f)(jnp.ones(3)), [2, 2, 2])
        np.testing.assert_array_equal(jax.jit(jax.vmap(f))(jnp.ones((2, 3))), [3, 3])
        np.testing.assert_array_equal(nested_grad(lambda x: jnp.sum(x**2), jnp.ones(3)), [2, 2, 2])


def test_nothing_where_a_value_is_declared(border):
    f = julia_function("x -> nothing", result=jax.ShapeDtypeStruct((), "float32"))
    with pytest.raises(JuliaError, match="returned nothing where a number or an array"):
        f(1.0)


@pytest.mark.parametrize("message", ['"a\\0b"', "String(UInt8[0x61, 0xff, 0x62])"])
def test_a_message_that_is_no_text(border, message):
    f = julia_function(f"x -> error({message})", result=jax.ShapeDtypeStruct((), "float32"))
    with pytest.raises(JuliaError, match="a\ufffdb") as caught:
        f(1.0)
    assert len(caught.value.lines) == 1


def test_nan_passes(border):
    assert np.isnan(jax.jit(julia_function("x -> x + 1"))(jnp.nan))
    with jax.debug_nans(True):
        assert jax.jit(julia_function("x -> x + 1"))(1.0) == 2


# ---- the FFI's structs ------------------------------------------------------------------------

STRUCTS = {
    "CallFrame": ("XLA_FFI_CallFrame", {}),
    "Operands": ("XLA_FFI_Args", {"buffers": "args"}),
    "Attributes": ("XLA_FFI_Attrs", {}),
    "Buffer": ("XLA_FFI_Buffer", {}),
    "Scalar": ("XLA_FFI_Scalar", {}),
    "ErrorCreateArgs": ("XLA_FFI_Error_Create_Args", {}),
    "ExtensionBase": ("XLA_FFI_Extension_Base", {}),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", {}),
    "Metadata": ("XLA_FFI_Metadata", {}),
    "ApiVersion": ("XLA_FFI_Api_Version", {}),
    "Api": ("XLA_FFI_Api", {"error_create": "XLA_FFI_Error_Create"}),
}


def test_the_structs_are_those_of_the_header(julia, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to read the header with")
    lines, right = [], []
    for ours, (theirs, names) in STRUCTS.items():
        for field in julia.ask(f"join(fieldnames({ours}), ' ')").split():
            lines.append(f'printf("%zu ", offsetof({theirs}, {names.get(field, field)}));')
            right.append(f"fieldoffset({ours}, Base.fieldindex({ours}, :{field}))")
    source = tmp_path / "offsets.c"
    source.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <xla/ffi/api/c_api.h>\n"
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )
    program = tmp_path / "offsets"
    include = jax.ffi.include_dir()
    subprocess.run([compiler, f"-I{include}", str(source), "-o", str(program)], check=True)
    offsets = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert julia.ask(f"join(({', '.join(right)}), ' ')") == offsets.strip()


def test_the_version_is_that_of_the_header(julia):
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    major, minor = re.findall(r"#define XLA_FFI_API_M\w+ (\d+)", header.read_text())
    assert julia.ask('string(API_MAJOR, " ", API_MINOR)') == f"{major} {minor}"


def test_an_unknown_major_version_takes_the_callback_and_says_so(julia, monkeypatch):
    from pybridge.julia import border

    monkeypatch.setattr(border, "API_MAJOR", 17)
    border._registered.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"version 17.*pure_callback"):
            assert border.path() == "callback"
        assert jax.jit(julia_function("x -> 2x"))(2.0) == 4
    finally:
        border._registered.cache_clear()


def test_a_wrong_word_in_the_environment(julia, monkeypatch):
    monkeypatch.setenv("PYBRIDGE_BORDER", "fast")
    with pytest.raises(ValueError, match="'fast'; accepted are 'ffi' and 'callback'"):
        julia_function("x -> 2x")(2.0)


def test_a_function_that_changes_what_samples_share_is_found_out(border):
    f = julia_function(
        "(x, w) -> (w .+= 1; sum(x .* w))", result=jax.ShapeDtypeStruct((), "float32")
    )
    with pytest.raises(JuliaError, match="changed an argument that all samples"):
        jax.vmap(f, (0, None))(jnp.ones((3, 2)), jnp.ones(2))
    np.testing.assert_array_equal(jax.vmap(f, (0, 0))(jnp.ones((3, 2)), jnp.ones((3, 2))), 4)


def test_lent_arguments(border):
    x = jnp.arange(6.0).reshape(2, 3)
    f = julia_function("x -> 2 .* x .+ sum(x)", borrow=True)
    np.testing.assert_array_equal(jax.jit(f)(x), 2 * np.arange(6).reshape(2, 3) + 15)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(f(x)))(x), 2 + 6)
    np.testing.assert_array_equal(jax.vmap(f)(x), 2 * x + jnp.sum(x, 1, keepdims=True))
    two = julia_function("x -> (y = x .+ 1; z = y .* 2; y .+ z)", borrow=True)
    np.testing.assert_array_equal(jax.jit(two)(x), 3 * (np.arange(6).reshape(2, 3) + 1))
    scaled = julia_function("(a, x) -> a .* x", borrow=True)
    np.testing.assert_array_equal(jax.jit(scaled)(3.0, x), 3 * x)


def test_a_lent_argument_cannot_be_written_to_or_kept(border):
    result = {"result": lambda x: x, "borrow": True}
    for code in ("x -> (x[1] = 7; x .+ 1)", "x -> (x .= 7; x .+ 1)"):
        with pytest.raises(JuliaError, match="cannot be written to"):
            julia_function(code, **result)(jnp.ones(3))
    kept = julia_function(
        "const kept = Any[]; x -> (push!(kept, x); y = x .+ 1; push!(kept, y); y .+ kept[1])",
        **result,
    )
    np.testing.assert_array_equal(kept(jnp.ones(3)), 3)
    with pytest.raises(JuliaError, match="the call is over"):
        kept(jnp.ones(3))


# Rank 2, 264 KB: large enough to be lent unasked.
LARGE = (220, 300)
UNNOTICED = [
    ("x -> 2 .* x .+ 1", lambda x: 2 * x + 1),
    ("(x::AbstractMatrix) -> tanh.(x) .* x .^ 2", lambda x: np.tanh(x) * x**2),
    ("x -> (y = x ./ sum(x); y .+ maximum(abs, x))", lambda x: x / x.sum() + abs(x).max()),
    ("x -> map(sin, x)", np.sin),
    ("x -> sum(abs2, x)", lambda x: (x**2).sum()),
    ("x -> x", lambda x: x),
    ("x -> x .+ ones(Float32, 220)", lambda x: x + 1),
]
NOTICED = [
    ("(x::Matrix) -> 2 .* x", lambda x: 2 * x),
    ("x -> (x .+= 1; x[1] = 2; 2 .* x)", lambda x: np.where(np.arange(66000).reshape(LARGE), 2 * x + 2, 4)),
    ("x -> x * ones(Float32, 300)", lambda x: x.sum(1)),
    ("x -> x[2, :]", lambda x: x[1]),
    ("const kept = Any[]; x -> (push!(kept, x); kept[end] .+ 0)", lambda x: x),
    ("const kept = Any[]; x -> map(v -> (push!(kept, v); v), x)", lambda x: x),
    ("x -> begin s = 0.0f0; for v in x; s += v; end; s end", lambda x: x.sum()),
    ("x -> collect(x')", lambda x: x.T),
    ("x -> x isa Matrix ? x .+ 1 : x .+ 2", lambda x: x + 1),
    ("begin h(x::Matrix) = 1 .* x; h(x::AbstractMatrix) = 2 .* x; x -> h(x) end", lambda x: x),
]  # fmt: skip


@pytest.mark.parametrize(("code", "right"), UNNOTICED + NOTICED)
def test_a_large_argument_is_lent_where_that_goes_unnoticed(julia, code, right):
    f = julia_function(code)
    x = np.random.default_rng(0).normal(size=LARGE).astype("f")
    for _ in range(2):
        np.testing.assert_allclose(jax.jit(f)(x), right(x), rtol=2e-4, atol=2e-3)
    lent = julia.ask(
        f'any(p -> p !== nothing && p.name == "{f.__name__}" && islent(typeof(p.z)), PLANS.plans)'
    )
    assert lent == str((code, right) in UNNOTICED).lower()
