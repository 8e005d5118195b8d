# A ComponentArray is lifted and projected as its flat data; the axes stay.
module NestedGradientsComponentArraysExt

using ComponentArrays: ComponentArray, getaxes, getdata
using NestedGradients: NestedGradients, DualArray

flat(s) = s
flat(s::ComponentArray) = getdata(s)

function NestedGradients.lift(
    ::Type{G},
    x::ComponentArray{<:Real},
    s::AbstractArray{<:Real},
) where {G}
    return ComponentArray(NestedGradients.lift(G, getdata(x), flat(s)), getaxes(x))
end
function NestedGradients.takepartials(::Type{G}, y::ComponentArray) where {G}
    partials = NestedGradients.takepartials(G, getdata(y))
    return partials === nothing ? nothing : ComponentArray(partials, getaxes(y))
end
function NestedGradients.project(x::ComponentArray{<:Real}, c::AbstractArray{<:Real})
    return ComponentArray(NestedGradients.project(getdata(x), flat(c)), getaxes(x))
end
# Zygote hands back a cotangent by components where all of them were used by name.
function NestedGradients.project(x::ComponentArray{<:Real}, c::NamedTuple)
    y = zero(x)
    for (name, value) in pairs(c)
        value === nothing || (getproperty(y, name) .= value)
    end
    return y
end

end
