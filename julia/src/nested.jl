# The operators as functions: what DifferentiationInterface's operators of an `AutoNested` call.
#
# All of them are forms, and `form` has rules: nothing here needs one of its own.

"The arguments of `f`: the point and what the contexts hold."
arguments(x, contexts) = (point(x), map(held, contexts)...)
# The point varies, integers in it too: as contexts and captures they would not.
point(x) = x
point(x::Union{Integer, Rational, AbstractArray{<:Union{Integer, Rational}}}) = float(x)
held(context) = context
held(context::DI.Context) = DI.unwrap(context)
held(::DI.Cache) = throw(ArgumentError(
    "an AutoNested backend cannot differentiate a function that writes into a Cache; let the function allocate, or use another backend for it",
))

onlyfirst(args::Tuple) = map((_, i) -> i == 1, args, ntuple(identity, length(args)))
alone(s, args) = (s, map(_ -> nothing, Base.tail(args))...)

"Zeros like `x`, for a derivative that is zero by structure."
zerolike(x) = nothing
zerolike(x::Number) = zero(float(x))
zerolike(x::AbstractArray{<:Number}) = zero(float(x))
zerolike(x::Union{Tuple, NamedTuple, AbstractArray}) = map(zerolike, x)
ChainRulesCore.@non_differentiable zerolike(::Any)
dense(::Nothing, x) = zerolike(x)
dense(derivative, x) = derivative

"""
    nested_gradient(f, backend, x, contexts...)

The gradient of the scalar function `f(x, contexts...)` with respect to `x`, as a function that can be
differentiated again, with respect to `x`, the contexts and what `f` captured. `backend` is the backend of
the reverse pass (`AutoZygote()`), or an [`AutoNested`](@ref) of it. A context is a plain value or a
context of DifferentiationInterface. The result has the structure, shape and float type of `x`.

Throws an `ArgumentError` if `f` does not return a real number.

```jldoctest
julia> using NestedGradients, Zygote, ADTypes

julia> penalty(p) = sum(abs2, nested_gradient((x, p) -> p * sum(x .^ 3), AutoZygote(), [1.0, 2.0], p));

julia> penalty(2.0), only(Zygote.gradient(penalty, 2.0))  # p² Σ 9x⁴ and its derivative in p
(612.0, 612.0)
```
"""
function nested_gradient(f::F, backend, x, contexts...) where {F}
    args = arguments(x, contexts)
    cotangents = form(
        inner(backend),
        f,
        args,
        (Unit(), nothing),
        Val(1);
        wanted = onlyfirst(args),
    )
    return dense(first(cotangents), x)
end

"""
    value_and_nested_gradient(f, backend, x, contexts...)

`f(x, contexts...)` and its [`nested_gradient`](@ref), from one evaluation; both can be differentiated again.
"""
function value_and_nested_gradient(f::F, backend, x, contexts...) where {F}
    args = arguments(x, contexts)
    y, cotangents = value_and_cotangents(inner(backend), f, args, onlyfirst(args))
    return y, dense(first(cotangents), x)
end

"""
    mixed_vjp(f, backend, x, v, contexts...) -> (H_xx v, H_px v, ...)

The cotangents that `v` pulls back through the gradient of the scalar `f(x, contexts...)`: the Hessian
product of `x`, and the mixed second derivative of each context, all from one reverse pass. What does
not vary, or is zero by structure, is `nothing`.

```jldoctest
julia> using NestedGradients, Zygote, ADTypes

julia> mixed_vjp((x, p) -> p * x^3, AutoZygote(), 2.0, 1.0, 5.0)  # 6p x, 3x²
(60.0, 12.0)
```
"""
function mixed_vjp(f::F, backend, x, v, contexts...) where {F}
    args = arguments(x, contexts)
    return form(inner(backend), f, args, (Unit(), alone(v, args), nothing), Val(2))
end
