# A ComponentArray is lifted and projected as its flat data; the axes stay.
module NestedGradientsComponentArraysExt

using ComponentArrays: ComponentArray, getaxes, getdata
using NestedGradients: NestedGradients

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
# Zygote hands back a cotangent by components where all of them were used by name.
NestedGradients.projected(x::ComponentArray{<:Real}, c) = withaxes(x, c)
function withaxes(x, c::AbstractArray)
    return ComponentArray(NestedGradients.projected(getdata(x), flat(c)), getaxes(x))
end
function withaxes(x, c::NamedTuple)
    y = zero(x)
    for (name, value) in pairs(c)
        value === nothing || (getproperty(y, name) .= value)
    end
    return y
end

function NestedGradients.unravel(x::ComponentArray{<:Number}, v, offset)
    data, offset = NestedGradients.unravel(getdata(x), v, offset)
    return ComponentArray(data, getaxes(x)), offset
end

end
