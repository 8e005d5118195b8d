# fatou-ignore-file discouraged-function: memory of XLA and of Python is reached through pointers, and every one is loaded, stored or wrapped within the call that it was given to.
# The pointers that XLA and Python call. An exception never leaves one of them: it would end the
# process. `answer` and `run` take the place of juliacall's calls, which hold Python's lock while
# Julia works, and so could wait for each other for ever when several threads are about.

const OPEN = Int32(0)
const CLOSED = Int32(1) # Python is exiting
const FORKED = Int32(2) # this process is a fork of the one that started Julia
const ALONE = Int32(3)  # Julia's signal handlers are off: one thread at a time

# Written by Python, which holds the address; read by every call.
const GATE = Ref{Int32}(OPEN)
const INSIDE = Threads.Atomic{Int}(0)
const CALLS = Threads.Atomic{Int}(0)

# What is said at a gate that is not open, as C strings made when the pointers are. A forked child
# must get its answer without a single allocation or compilation: Julia's compiler writes new code
# through a file that a fork shares with its parent, and would write it into the parent.
const REFUSALS = Ref{NTuple{3, Ptr{UInt8}}}()

refusals() = map(
    why -> text(REPORT_START * "pybridge: " * why * REPORT_END),
    (
        "Python is exiting, and Julia has ended before this call began",
        "this process was forked from the one that started Julia, and a Julia runtime does not survive \
     a fork. Use multiprocessing's \"spawn\" start method",
        "several threads are in Julia at once, and Julia runs without its signal handlers since \
     juliacall was imported before pybridge or PYTHON_JULIACALL_HANDLE_SIGNALS=no. Use a Julia \
     function of pybridge's first, and set PYTHON_JULIACALL_HANDLE_SIGNALS=yes",
    ),
)

function execute(number, inputs::Buffers, outputs::Buffers)
    plan = (@atomic PLANS.plans)[number]
    plan(inputs, outputs)
    return nothing
end

plan_name(number) = try
    getfield((@atomic PLANS.plans)[number], :name)::String
catch
    "plan $number"
end

# XLA's handler, one for every function, order and shape.
function handle(frame::Ptr{CallFrame})::Ptr{Cvoid}
    unsafe_load(field_pointer(frame, Val(:extension_start))) == C_NULL ||
        (answer_metadata(frame) && return C_NULL)
    unsafe_load(field_pointer(frame, Val(:stage))) == STAGE_EXECUTE || return C_NULL
    gate = GATE[]
    (gate == CLOSED || gate == FORKED) && return xla_error(frame, REFUSALS[][gate])
    inside = Threads.atomic_add!(INSIDE, 1) + 1
    Threads.atomic_add!(CALLS, 1)
    number = plan_number(frame)
    result = Ptr{Cvoid}(C_NULL)
    try
        if gate == ALONE && inside > 1
            result = xla_error(frame, REFUSALS[][ALONE])
        else
            inputs = unsafe_load(field_pointer(
                field_pointer(frame, Val(:args)),
                Val(:buffers),
            ))
            outputs = unsafe_load(field_pointer(
                field_pointer(frame, Val(:rets)),
                Val(:buffers),
            ))
            execute(number, Buffers(inputs, true), Buffers(outputs, true))
        end
    catch e
        result = xla_error(frame, report(plan_name(number), e, catch_backtrace()))
    end
    Threads.atomic_sub!(INSIDE, 1)
    return result
end

# The callback path: the same plan on addresses from NumPy. Returns NULL, or a text to be freed.
function run(number::Int64, inputs::Ptr{Ptr{Cvoid}}, outputs::Ptr{Ptr{Cvoid}})::Ptr{UInt8}
    gate = GATE[]
    inside = Threads.atomic_add!(INSIDE, 1) + 1
    Threads.atomic_add!(CALLS, 1)
    result = Ptr{UInt8}(C_NULL)
    try
        if gate == CLOSED || gate == ALONE && inside > 1
            result = text(unsafe_string(REFUSALS[][gate]))
        else
            execute(number, Buffers(inputs, false), Buffers(outputs, false))
        end
    catch e
        result = text(report(plan_name(number), e, catch_backtrace()))
    end
    Threads.atomic_sub!(INSIDE, 1)
    return result
end

# Evaluate one expression in this module: "+" and its value as text, or "-" and the report.
function answer(name::Cstring, question::Cstring)::Ptr{UInt8}
    return try
        value = Core.eval(@__MODULE__, Meta.parse(unsafe_string(question)))
        text("+" * Base.invokelatest(string, value))
    catch e
        text("-" * report(unsafe_string(name), e, catch_backtrace()))
    end
end

function text(s::String)
    copy = Ptr{UInt8}(Libc.malloc(sizeof(s) + 1))
    GC.@preserve s unsafe_copyto!(copy, pointer(s), sizeof(s))
    unsafe_store!(copy, 0x00, sizeof(s) + 1)
    return copy
end

release(p::Ptr{UInt8})::Cvoid = Libc.free(p)

no_error(::Ptr{ErrorCreateArgs})::Ptr{Cvoid} = C_NULL

# The way of a refusal, walked once, so that all of it is compiled before any fork.
function rehearse_refusal()
    frame, api = zeros(UInt8, sizeof(CallFrame)), zeros(UInt8, sizeof(Api))
    GC.@preserve frame api begin
        f, a = Ptr{CallFrame}(pointer(frame)), Ptr{Api}(pointer(api))
        unsafe_store!(field_pointer(f, Val(:api)), a)
        unsafe_store!(field_pointer(f, Val(:stage)), STAGE_EXECUTE)
        create = @cfunction(no_error, Ptr{Cvoid}, (Ptr{ErrorCreateArgs},))
        unsafe_store!(field_pointer(a, Val(:error_create)), create)
        GATE[] = FORKED
        ccall(
            @cfunction(handle, Ptr{Cvoid}, (Ptr{CallFrame},)),
            Ptr{Cvoid},
            (Ptr{CallFrame},),
            f,
        )
        GATE[] = OPEN
    end
    return nothing
end

"""
    pointers() -> String

The addresses, for Python: made at run time, since a precompiled one would not be valid.
"""
function pointers()
    REFUSALS[] = refusals()
    rehearse_refusal()
    # Whoever prints to a pipe or terminal, sleeps or starts a process waits for Julia's event loop.
    # Only Julia's first thread turns it, and that one is Python's, except inside a threaded region:
    # there any thread that waits does. So all of Julia is one from here on.
    ccall(:jl_enter_threaded_region, Cvoid, ())
    addresses = (
        handle = @cfunction(handle, Ptr{Cvoid}, (Ptr{CallFrame},)),
        run = @cfunction(run, Ptr{UInt8}, (Int64, Ptr{Ptr{Cvoid}}, Ptr{Ptr{Cvoid}})),
        answer = @cfunction(answer, Ptr{UInt8}, (Cstring, Cstring)),
        release = @cfunction(release, Cvoid, (Ptr{UInt8},)),
        gate = Base.unsafe_convert(Ptr{Int32}, GATE),
        safe_enter = cglobal(:jl_gc_safe_enter),
        unsafe_enter = cglobal(:jl_gc_unsafe_enter),
        inside = Base.unsafe_convert(Ptr{Int}, INSIDE),
    )
    return join((string(k, "=", UInt(v)) for (k, v) in pairs(addresses)), " ")
end
