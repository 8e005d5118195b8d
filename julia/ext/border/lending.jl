# May a large argument be lent without the function noticing? Julia's compiler is asked: the function
# is inferred on a `Probe`, which knows broadcasts, `map` and whole reductions, and whose elements
# cannot be reached otherwise without a side effect. A function that is free of side effects on it
# writes to no argument, keeps none, and loops over none in a way that a lent array makes slower. It may
# still ask for a type (`x isa Vector`, a method for `Vector`), so it is tried once on made-up arrays, as
# they are and lent. All others, and those that want an `Array`, get copies.

# Below this a copy costs less than it is worth asking for, in bytes.
const LARGE = 1 << 18

struct Probe{T, N} <: AbstractArray{T, N}
    dims::NTuple{N, Int}
    value::T
end

const TOUCHED = Ref(1)
touched() = TOUCHED[] = 0

Base.size(x::Probe) = x.dims
Base.getindex(x::Probe, i::Int...) = (touched(); x.value)
Base.setindex!(x::Probe, value, i::Int...) = touched()
Base.first(x::Probe) = x.value

struct ProbeStyle{N} <: Broadcast.AbstractArrayStyle{N} end
ProbeStyle{N}(::Val{M}) where {N, M} = ProbeStyle{M}()
Base.BroadcastStyle(::Type{<:Probe{T, N}}) where {T, N} = ProbeStyle{N}()

const ProbeBroadcast = Broadcast.Broadcasted{<:ProbeStyle}

# Without its check of dimensions: the message of that error counts as a side effect.
Broadcast.materialize(bc::Broadcast.Broadcasted{ProbeStyle{N}}) where {N} = Probe(
    ntuple(_ -> TOUCHED[], Val(N)),
    element(bc),
)
Base.copyto!(to::AbstractArray, bc::ProbeBroadcast) = (touched(); to)
Base.map(f, x::Probe) = Probe(x.dims, f(x.value))

element(x) = x
element(x::Probe) = x.value
element(x::Union{AbstractArray, Tuple, Ref}) = first(x)
element(bc::Broadcast.Broadcasted) = bc.f(map(element, bc.args)...)

for (reduce, combine) in (
        (:sum, :(Base.add_sum)),
        (:prod, :(Base.mul_prod)),
        (:maximum, :max),
        (:minimum, :min),
    )
    @eval Base.$reduce(x::Probe) = $combine(x.value, x.value)
    @eval Base.$reduce(f, x::Probe) = let y = f(x.value)
        $combine(y, y)
    end
end

islarge((T, dims, _)) = !isempty(dims) && sizeof(T) * prod(dims) >= LARGE

"""
    lendable(call, args, z) -> Bool

Whether `call` is provably none the wiser when the large leaves among `z`, the
`(element type, dims, flags)` of its arguments, are lent.
"""
function lendable(call, args, z)
    any(islarge, z) || return false
    leaves = map(z) do (T, dims, flags)
        islarge((T, dims, flags)) ? Probe(dims, zero(T)) : example(T, map(_ -> 1, dims))
    end
    types = Base.typesof(NestedGradients.fill(args, leaves)...)
    return try
        result = Base.promote_op(call, fieldtypes(types)...)
        result !== Union{} &&
            result <: Union{Number, Probe} &&
            Core.Compiler.is_effect_free(Base.infer_effects(call, types)) &&
            unaware(call, args, z)
    catch
        false # the compiler's interface is its own affair; copies are always right
    end
end

"Whether `call`, which has no side effects, gives the same on lent arrays as on arrays."
function unaware(call, args, z)
    arrays = map(((T, dims, _),) -> example(T, dims), z)
    loan = Loan(Ptr{Nothing}(), (), false, true) # no result is made in it
    lent = map(arrays, z) do x, leaf
        islarge(leaf) ? Borrowed(pointer(x), size(x), loan, false) : x
    end
    return GC.@preserve arrays isequal(
        call(NestedGradients.fill(args, arrays)...),
        call(NestedGradients.fill(args, lent)...),
    )
end
