# fatou-ignore-file discouraged-function: a loan is a pointer that is good for one call, and every use of one asks first whether it still is.

# XLA's memory lent to a function for one call, for large arrays that a copy would cost too much: no
# copy of an argument, and the first broadcast of the result's shape is made in XLA's own result.
# After the call every loan is void: whoever kept one gets an error, not freed memory.
#
# A `Borrowed` is no `DenseArray`: BLAS would write through its pointer, and writing to an argument
# is an error. Broadcasts run on plain arrays inside, at their full speed.

mutable struct Loan{T, N}
    result::Ptr{T} # XLA's buffer of the one result
    const dims::NTuple{N, Int}
    claimed::Bool
    valid::Bool
end

struct Borrowed{T, N, L <: Loan} <: AbstractArray{T, N}
    pointer::Ptr{T}
    dims::NTuple{N, Int}
    loan::L
    writable::Bool
end

# The leaf of a plan that is lent.
struct Lent{T, N}
    dims::NTuple{N, Int}
end

lend(leaf::Lent{T, N}, p, loan) where {T, N} = Borrowed(Ptr{T}(p), leaf.dims, loan, false)
lend(leaf::Leaf, p, loan) = load(leaf, p, ())

function store!(leaf::Leaf, p, ::Loan, value)
    value isa Borrowed && value.pointer == p && return nothing
    return store!(leaf, p, (), value isa Borrowed ? array(value) : value)
end

function valid(x::Borrowed)
    x.loan.valid ||
        error(
            "this array was lent to the function for one call (borrow=True), and the call is over; \
         keep copy(x) instead",
        )
    return x
end

# A plain array on the same memory, for use within the call.
array(x::Borrowed) = unsafe_wrap(Array, valid(x).pointer, x.dims)

Base.size(x::Borrowed) = x.dims
Base.IndexStyle(::Type{<:Borrowed}) = IndexLinear()
Base.copy(x::Borrowed) = copy(array(x))
Base.copyto!(to::Array, x::Borrowed) = copyto!(to, array(x))
Base.map(f, x::Borrowed) = broadcast(f, x)
for reduce in (:sum, :prod, :maximum, :minimum)
    @eval Base.$reduce(x::Borrowed) = $reduce(array(x))
    @eval Base.$reduce(f, x::Borrowed) = $reduce(f, array(x))
end

Base.@propagate_inbounds function Base.getindex(x::Borrowed, i::Int)
    @boundscheck checkbounds(x, i)
    return unsafe_load(valid(x).pointer, i)
end

Base.@propagate_inbounds function Base.setindex!(x::Borrowed, value, i::Int)
    x.writable ||
        error("an argument lent with borrow=True cannot be written to; copy it first")
    @boundscheck checkbounds(x, i)
    unsafe_store!(valid(x).pointer, convert(eltype(x), value), i)
    return x
end

# ---- broadcasting -------------------------------------------------------------------------------

struct BorrowedStyle{N} <: Broadcast.AbstractArrayStyle{N} end
BorrowedStyle{N}(::Val{M}) where {N, M} = BorrowedStyle{M}()
Base.BroadcastStyle(::Type{<:Borrowed{T, N}}) where {T, N} = BorrowedStyle{N}()

const LentBroadcast = Broadcast.Broadcasted{<:BorrowedStyle}

plain(x) = x
plain(x::Borrowed) = array(x)
plain(bc::Broadcast.Broadcasted) = Broadcast.Broadcasted{Nothing}(
    bc.f,
    map(plain, bc.args),
    bc.axes,
)

loan_of(x::Borrowed) = x.loan
loan_of(x) = nothing
loan_of(bc::Broadcast.Broadcasted) = first_loan(bc.args...)
first_loan() = nothing
first_loan(x, rest...) = let loan = loan_of(x)
    loan === nothing ? first_loan(rest...) : loan
end

function Base.copy(bc::LentBroadcast)
    T = Broadcast.combine_eltypes(bc.f, bc.args)
    isconcretetype(T) || return copy(Broadcast.instantiate(restyled(bc)))
    to = claim!(loan_of(bc), T, map(length, axes(bc)))
    copyto!(plain(to), plain(bc))
    return to
end

restyled(bc) = Broadcast.Broadcasted{Broadcast.DefaultArrayStyle{ndims(bc)}}(
    bc.f,
    map(plain, bc.args),
)

Base.copyto!(to::AbstractArray, bc::LentBroadcast) = copyto!(to, plain(bc))
function Base.copyto!(to::Borrowed, bc::LentBroadcast)
    to.writable ||
        error("an argument lent with borrow=True cannot be written to; copy it first")
    copyto!(array(to), plain(bc))
    return to
end

function claim!(loan::Loan{R}, ::Type{T}, dims) where {R, T}
    (T === R && !loan.claimed && dims === loan.dims) || return Array{T}(undef, dims)
    loan.claimed = true
    return Borrowed(loan.result, loan.dims, loan, true)
end

# ---- a plan with lent leaves ----------------------------------------------------------------------

function run_lent(plan, inputs, outputs)
    leaf = only(plan.out)
    loan = Loan(pointer_for(leaf, data(outputs, 1)), leaf.dims, false, true)
    try
        lent = each_group(
            (leaves, first, _) -> lent_leaves(leaves, inputs, first, loan),
            plan,
        )
        run_sample(plan, lent, outputs, loan)
    finally
        loan.valid = false
    end
    return nothing
end

@generated lent_leaves(leaves::T, buffers, first, loan) where {T <: Tuple} = each_given(
    T,
    (i, n) -> :(lend(leaves[$i], data(buffers, first + $(n - 1)), loan)),
)

pointer_for(::Leaf{T}, p) where {T} = Ptr{T}(p)

islent(::Type{Z}) where {Z <: Tuple} = any(T -> T <: Lent, fieldtypes(Z))
