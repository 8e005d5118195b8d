# ReverseDiff as the outer AD: its tracked numbers stay outside of a form, which its tape holds as one
# instruction. The pullback of that instruction is a form again.
module NestedGradientsReverseDiffExt

using NestedGradients: NestedGradients, basefloat, captured, form, ravel, rebuild, unravel
using ReverseDiff:
    ReverseDiff,
    SpecialInstruction,
    TrackedReal,
    increment_deriv!,
    pull_value!,
    track,
    unseed!

const Tracked = Union{TrackedReal, AbstractArray{<:TrackedReal}}

NestedGradients.records(::Type{<:TrackedReal}) = true
NestedGradients.basefloat(::Type{<:TrackedReal{V}}) where {V} = basefloat(V)
NestedGradients.captured(x::Tracked, path) = x
NestedGradients.rebuilt(::Tracked, leaf) = leaf
NestedGradients.zerolike(x::Tracked) = zero(ReverseDiff.value(x))

"A form as a function of one vector, which holds all that varies in its function, arguments and slots."
struct Flat{B, W, Z, L}
    backend::B
    open::Int
    wanted::W
    inputs::Z
    leaves::L
end
function result(f::Flat, v)
    h, args, slots = rebuild(f.inputs, first(unravel(f.leaves, v, 0)))
    return form(f.backend, h, args, slots, Val(f.open); f.wanted)
end
(f::Flat)(v) = ravel(result(f, v))

function NestedGradients.evaluated(
    ::Type{<:TrackedReal},
    ::Type,
    backend,
    h,
    args,
    slots,
    ::Val{O},
    wanted,
) where {O}
    tracked = captured((h, args, slots), ())
    input = ravel(tracked)
    leaves = first(unravel(tracked, ReverseDiff.value(input), 0))
    f = Flat(backend, O, wanted, rebuild((h, args, slots), leaves), leaves)
    y = result(f, ReverseDiff.value(input))
    isempty(ravel(y)) && return y
    tape = ReverseDiff.tape(input)
    output = track(float(ravel(y)), tape)
    ReverseDiff.record!(tape, SpecialInstruction, f, input, output)
    return first(unravel(y, output, 0))
end

# Both run the form where the input is now: a compiled tape is run again with other values.
@noinline function ReverseDiff.special_reverse_exec!(i::SpecialInstruction{<:Flat})
    v, c = ReverseDiff.value(i.input), ReverseDiff.deriv(i.output)
    dv = only(form(i.func.backend, i.func, (v,), (copy(c), nothing), Val(1)))
    dv === nothing || increment_deriv!(i.input, dv)
    unseed!(i.output)
    return nothing
end
@noinline function ReverseDiff.special_forward_exec!(i::SpecialInstruction{<:Flat})
    pull_value!(i.input)
    ReverseDiff.value!(i.output, i.func(ReverseDiff.value(i.input)))
    return nothing
end

end
