# What pushforward, pullback and hvp have in common: products with a tuple of directions or covectors.

using DifferentiationInterface: DifferentiationInterface as DI, Constant
using Zygote: Zygote

"""
    checkproducts(operators, backend, f, x, ts, p, value, expected)

All spellings of a product with each of `ts` at `f(x, p)`, and its derivatives in the point, in the
direction, in the context and in a capture, against differences. `operators` holds the operator of
DifferentiationInterface, the one that also returns `value`, and the preparation.
"""
function checkproducts((product, valued, prepare), backend, f, x, ts, p, value, expected)
    @test agree(product(f, backend, x, ts, Constant(p)), expected)
    @test agree(valued(f, backend, x, ts, Constant(p)), (value, expected))
    prep = prepare(f, backend, x, ts, Constant(p))
    @test agree(product(f, prep, backend, x, ts, Constant(p)), expected)
    @test agree(valued(f, prep, backend, x, ts, Constant(p)), (value, expected))

    outer(x, t, p) = sum(abs2, only(product(f, backend, x, (t,), Constant(p))))
    z = (x, first(ts), p)
    reference = differences(z -> outer(z...), z)
    @test agree(Zygote.gradient(outer, z...), reference; rtol = 1.0e-6)
    captured(p) = sum(abs2, only(product(x -> f(x, p), backend, x, (first(ts),))))
    @test agree(only(Zygote.gradient(captured, p)), last(reference); rtol = 1.0e-6)
    @test agree(DI.gradient(captured, backend, p), last(reference); rtol = 1.0e-6)
end
