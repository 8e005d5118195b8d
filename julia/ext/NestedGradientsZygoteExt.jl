# Zygote runs the reverse pass, and is told how our arrays add and broadcast.
module NestedGradientsZygoteExt

using ADTypes: AutoZygote
using Base.Broadcast: AbstractArrayStyle, broadcasted
using ForwardDiff: Dual, Partials
using NestedGradients: NestedGradients, DualArray, DualStyle, Level, context, dual
using Zygote: Zygote, ZygoteRules, @adjoint

function NestedGradients.reversepass(::AutoZygote, h::H, s0, z::Tuple) where {H}
    y, back = Zygote.pullback(h, z...)
    cotangents = NestedGradients.plain(back(NestedGradients.seed(s0, y))) # without thunks
    return y, cotangents === nothing ? map(_ -> nothing, z) : cotangents
end

Zygote.accum(x::DualArray, y::DualArray) = x .+ y

# ---- broadcasts ----
#
# Zygote broadcasts a function without captures over untagged dual numbers, one array of them for all
# arguments. Over our arrays we do it in one pass an argument, with a tag of our own that lies outside
# theirs: the passes keep two streams apart as all our loops do, and cannot be mistaken for others.

"""
`f` with its argument `I` made a dual number of partial 1. The result is one whatever `f` returns, over the type
`R`: a branch such as `ifelse(mask, a, b)` or `x > 0 ? x : 0.0` may return what does not depend on that argument.
"""
struct Seeded{I, G, R, F}
    f::F
end
Seeded{I, G, R}(f::F) where {I, G, R, F} = Seeded{I, G, R, F}(f)
@inline function (s::Seeded{I, G, R})(args::Vararg{Any, N}) where {I, G, R, N}
    y = s.f(ntuple(j -> j == I ? dual(G, args[j], one(args[j])) : args[j], Val(N))...)
    v, p = NestedGradients.parts(G, y)
    partial = p === nothing ? zero(R) : convert(R, p)
    return Dual{G, R, 1}(convert(R, v), Partials{1, R}((partial,)))
end

"The type that results of the inferred type `T` are promoted to."
joined(::Type{T}) where {T} = promote_type(Base.uniontypes(T)...)

varies(::Type{T}) where {T} = T <: Union{AbstractFloat, Dual}
varies(x::Number) = varies(typeof(x))
varies(x::AbstractArray{T}) where {T} = varies(T)
varies(x::Ref{T}) where {T} = varies(T)
varies(x) = false

direct(
    x::Union{Real, AbstractArray{<:Real}, Ref{<:Real}, Type, Val, Symbol, Function},
) = true
direct(x) = false

@adjoint function broadcasted(style::DualStyle, f::F, args...) where {F <:
    Union{Function, Type}}
    T = Broadcast.combine_eltypes(f, args)
    T === Bool && return f.(args...), _ -> nothing
    R = joined(T)
    if !(R <: Real && isconcretetype(R) && Base.issingletontype(F) && all(direct, args))
        # Zygote's own, which pulls back through every element. (Its `_pullback` would ask us again.)
        return invoke(
            ZygoteRules.adjoint,
            Tuple{
                typeof(__context__),
                typeof(broadcasted),
                AbstractArrayStyle,
                F,
                Vararg{Any},
            },
            __context__,
            broadcasted,
            style,
            f,
            args...,
        )
    end
    G = Level{1, context(args)}
    passes = ntuple(
        i -> varies(args[i]) ? Seeded{i, G, R}(f).(args...) : nothing,
        Val(length(args)),
    )
    slopes = map(pass -> NestedGradients.takepartials(G, pass), passes)
    first_pass = findfirst(!isnothing, slopes)
    y = first_pass === nothing ?
        f.(args...) :
        NestedGradients.parts(G, passes[first_pass])[1]
    function broadcasted_pullback(Δ)
        cotangents = map(
            (x, slope) -> slope === nothing ? nothing : Zygote.unbroadcast(x, Δ .* slope),
            args,
            slopes,
        )
        return (nothing, nothing, cotangents...)
    end
    return y, broadcasted_pullback
end

# ---- captured values that are mutable: Zygote's own mutable gradients ----

function NestedGradients.mutabletangent(cfg::Zygote.ZygoteRuleConfig, x, fields)
    gradient = Zygote.grad_mut(cfg.context, x)
    gradient[] = Zygote.accum(gradient[], map(Zygote.wrap_chainrules_output, fields))
    return gradient
end
NestedGradients.mutablecotangent(
    cfg::Zygote.ZygoteRuleConfig,
    g,
    c,
) = NestedGradients.plain(Zygote.grad_mut(cfg.context, g)[])

end
