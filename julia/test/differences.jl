# The reference for every derivative: differences in float64.

"""
    differences(f, z)

The derivative of the number `f(z)` in every float of the nest `z`, structured like `z`, from five-point
central differences: the error is about 1e-11 for functions of order one.
"""
function differences(f, z; h = 1.0e-3)
    flat = flatten(z)
    derivative = map(eachindex(flat)) do i
        at(d) = f(refill(z, (v = copy(flat); v[i] += d; v)))
        return (8 * (at(h) - at(-h)) - (at(2h) - at(-2h))) / 12h
    end
    return refill(z, derivative)
end

flatten(x::AbstractFloat) = Float64[x]
flatten(x::AbstractArray{<:AbstractFloat}) = Vector{Float64}(vec(x))
flatten(x) = Float64[]
flatten(x::Union{Tuple, NamedTuple}) = reduce(
    vcat,
    map(flatten, values(x));
    init = Float64[],
)

refill(x, v) = first(refilled(x, v, 0))
refilled(x, v, k) = x, k
refilled(x::AbstractFloat, v, k) = v[k + 1], k + 1
function refilled(x::AbstractArray{<:AbstractFloat}, v, k)
    y = similar(x, Float64)
    y .= reshape(view(v, (k + 1):(k + length(x))), size(x))
    return y, k + length(x)
end
function refilled(x::Union{Tuple, NamedTuple}, v, k)
    parts = Any[]
    for a in values(x)
        b, k = refilled(a, v, k)
        push!(parts, b)
    end
    return (x isa Tuple ? Tuple(parts) : NamedTuple{keys(x)}(Tuple(parts))), k
end

"Do two nests agree, leaf by leaf? A missing leaf must be a zero."
agree(a, b; kw...) = a == b
agree(::Nothing, b; kw...) = all(iszero, flatten(b))
agree(a, ::Nothing; kw...) = all(iszero, flatten(a))
agree(::Nothing, ::Nothing; kw...) = true
agree(a::Number, b::Number; rtol = 1.0e-7, atol = 1.0e-8) = isapprox(
    a,
    b;
    rtol,
    atol,
    nans = true,
)
function agree(
    a::AbstractArray{<:Number},
    b::AbstractArray{<:Number};
    rtol = 1.0e-7,
    atol = 1.0e-8,
)
    return size(a) == size(b) && isapprox(collect(a), collect(b); rtol, atol, nans = true)
end
agree(a::Tuple, b::Tuple; kw...) = length(a) == length(b) &&
    all(map((x, y) -> agree(x, y; kw...), a, b))
function agree(a::NamedTuple, b::NamedTuple; kw...)
    names = union(keys(a), keys(b))
    return all(n -> agree(get(a, n, nothing), get(b, n, nothing); kw...), names)
end
