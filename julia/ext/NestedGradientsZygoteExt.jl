# Zygote runs the reverse pass, and is told how our arrays add and broadcast.
module NestedGradientsZygoteExt

using ADTypes: AutoZygote
using NestedGradients: NestedGradients, DualArray
using Zygote: Zygote

function NestedGradients.reversepass(::AutoZygote, h::H, s0, z::Tuple) where {H}
    y, back = Zygote.pullback(h, z...)
    cotangents = back(NestedGradients.seed(s0, y))
    return y, cotangents === nothing ? map(_ -> nothing, z) : cotangents
end

Zygote.accum(x::DualArray, y::DualArray) = x .+ y
Zygote.accum(x::DualArray, y::AbstractArray) = x .+ y
Zygote.accum(x::AbstractArray, y::DualArray) = x .+ y

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
