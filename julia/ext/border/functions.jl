# The user's functions, by number. Each code string is evaluated in a module of its own.

struct UserFunction
    name::String
    call::Any             # h(args...), one sample
    batch::Any            # h on samples stacked in the last dimension, or nothing
    samples::Vector{Bool} # which arguments carry samples, for `batch`
    threads::Bool         # may several samples be evaluated at once?
    # Are arguments lent rather than copied? nothing: the large ones, if that goes unnoticed.
    borrow::Union{Bool, Nothing}
end

const FUNCTIONS = Dict{Int, UserFunction}()
const FUNCTIONS_LOCK = Base.Threads.SpinLock()
const LAST_FUNCTION = Ref(0)

# The modules that code was evaluated in. Julia collects a module that nobody names, but not the
# methods and types that were defined in it, and the next type inference then reads freed memory.
const SPACES = Module[]

function add_function(f::UserFunction)
    return lock(FUNCTIONS_LOCK) do
        id = LAST_FUNCTION[] += 1
        FUNCTIONS[id] = f
        id
    end
end

function_of(id) = lock(() -> FUNCTIONS[id], FUNCTIONS_LOCK)
remove_function(id) = (lock(() -> delete!(FUNCTIONS, id), FUNCTIONS_LOCK); nothing)

"""
    register(; name, code, packages=String[], before=[], batch=nothing, samples=Bool[],
             threads=false, borrow=nothing) -> Int

Evaluate `code`, whose last expression is the function, in a fresh module that uses `packages`.
`before` holds what else is evaluated there, first: `(source name, code, name of the constant that is
its value, or "")`. `batch` is evaluated after `code`, in the same module.
"""
function register(;
    name,
    code,
    packages = String[],
    before = [],
    batch = nothing,
    samples = Bool[],
    threads = false,
    borrow = nothing,
)
    space = Module(:PyBridgeUser)
    push!(SPACES, space)
    for package in packages
        use(space, package)
    end
    for (source, text, constant) in before
        value = evaluate(space, source, text)
        isempty(constant) ||
            Core.eval(
                space,
                Expr(:const, Expr(:(=), Symbol(constant), Expr(:block, QuoteNode(value)))),
            )
    end
    # With code in front of it, the last step is pybridge's own, and no line of it the user's.
    source = isempty(before) ? name : "pybridge:" * name
    f = callable(evaluate(space, source, code))
    g = batch === nothing ?
        nothing :
        callable(evaluate(space, string(source, " (batch)"), batch))
    return add_function(UserFunction(name, f, g, samples, threads, borrow))
end

"""
    register(f; name) -> Int

Register a callable that Python holds.
"""
register(f; name = string(f)) = add_function(UserFunction(
    name,
    f,
    nothing,
    Bool[],
    false,
    nothing,
))

function use(space::Module, package)
    identity = Base.identify_package(package)
    if identity === nothing && !isdefined(Base, Symbol(package))
        throw(ArgumentError(
            "package $package is not installed in the Julia project $(Base.active_project()). " *
                "Add it there: julia --project=$(dirname(Base.active_project())) -e " *
                "'using Pkg; Pkg.add(\"$package\")'",
        ))
    end
    noninteractive(() -> Core.eval(space, Meta.parse("using $package")))
    return nothing
end

# An interactive Julia, as in Jupyter, has Pkg ask the registries before it loads a package.
function noninteractive(f)
    was = Base.is_interactive
    Base.eval(:(is_interactive = false))
    return try
        f()
    finally
        Base.eval(:(is_interactive = $was))
    end
end

function evaluate(space::Module, name, code)
    source = Symbol(name)
    startswith(name, "pybridge:") || (SOURCES[source] = split(code, '\n'))
    tree = Meta.parseall(code; filename = String(name))
    for part in tree.args
        if part isa Expr && part.head in (:error, :incomplete)
            throw(ArgumentError("syntax error, " * parse_report(part.args[1])))
        end
    end
    return Core.eval(space, tree)
end

function callable(f)
    f isa Union{Number, AbstractArray, AbstractString, Nothing, Symbol} || return f
    throw(ArgumentError(
        "the last expression of the code is $(summary(f)), not a function; " *
            "write for instance \"(x, ps) -> sum(ps.W * x)\"",
    ))
end

# ---- the shape of a result, found by one evaluation --------------------------------------------

"""
    describe(id, args) -> String

Evaluate function `id` once on `args` and describe the result as a Python literal.
"""
describe(id, args) = sprint(
    describe_value,
    Base.invokelatest(function_of(id).call, args...),
)

const DTYPES = Dict{DataType, String}(
    Bool => "bool",
    Int8 => "int8",
    Int16 => "int16",
    Int32 => "int32",
    Int64 => "int64",
    UInt8 => "uint8",
    UInt16 => "uint16",
    UInt32 => "uint32",
    UInt64 => "uint64",
    Float16 => "float16",
    Float32 => "float32",
    Float64 => "float64",
    ComplexF32 => "complex64",
    ComplexF64 => "complex128",
)

describe_value(io, ::Nothing) = print(io, "None")
describe_value(io, x::Number) = print(io, "('array', '", dtype(typeof(x)), "', ())")

function describe_value(io, x::AbstractArray)
    T = isconcretetype(eltype(x)) ?
        eltype(x) :
        mapreduce(typeof, promote_type, x; init = Bool)
    print(
        io,
        "('array', '",
        dtype(T),
        "', (",
        join((string(n, ",") for n in size(x))),
        "))",
    )
end

function describe_value(io, x::Tuple)
    print(io, "('tuple', [")
    foreach(y -> (describe_value(io, y); print(io, ", ")), x)
    print(io, "])")
end

function describe_value(io, x::NamedTuple)
    print(io, "('dict', {")
    for (key, y) in pairs(x)
        print(io, python_string(key), ": ")
        describe_value(io, y)
        print(io, ", ")
    end
    print(io, "})")
end

describe_value(io, x) = throw(ArgumentError(
    "the function returned a $(typeof(x)); accepted are numbers, arrays of numbers, nothing, " *
        "and tuples and named tuples of these",
))

dtype(T) = get(DTYPES, T) do
    throw(ArgumentError(
        "the function returned numbers of type $T, which JAX has no dtype for",
    ))
end

# Arguments for that evaluation: floats between 1/4 and 3/4, where most functions are defined, and
# never all alike, so that a matrix of them is regular; integers and Bool are one and true.
example(::Type{T}, ::Tuple{}) where {T <: AbstractFloat} = T(0.5)
example(::Type{T}, ::Tuple{}) where {T <: Complex} = T(0.5, 0.25)
example(::Type{T}, ::Tuple{}) where {T <: Integer} = one(T)
example(::Type{T}, dims) where {T <: Integer} = ones(T, dims)

function example(::Type{T}, dims) where {T <: Number}
    n = prod(dims)
    return reshape(T[0.25 + 0.5 * mod(0.6180339887 * i, 1) for i in 1:n], dims)
end
