# What a user reads of a Julia exception: Julia's message, the function's name, the lines of their
# own code. The hundred frames of Julia's, the AD's and the border's own are left out.

const REPORT_START = "JuliaError in "
const REPORT_END = "\n(end of JuliaError)"
const LONGEST_MESSAGE = 2000
const MOST_LINES = 6
const MUTATION = "the function wrote into an array, which has no derivative here. The argument outside is \
                  unchanged; write the function without mutation, `y = 2 .* x` instead of `x .= 2 .* x`. "

# Source name => lines, of the code strings that Python gave.
const SOURCES = Dict{Symbol, Vector{String}}()

function report(name::AbstractString, e, backtrace)
    io = IOBuffer()
    print(io, REPORT_START, name, ": ", message_of(e))
    for line in user_lines(backtrace)
        print(io, "\n  at ", line)
    end
    print(io, REPORT_END)
    return legible(String(take!(io)))
end

# It goes to Python as a C string in UTF-8, whatever the user's message holds.
legible(text) = map(c -> isvalid(c) && c != '\0' ? c : '\ufffd', text)

message_of(e::LoadError) = message_of(e.error)
message_of(e::TaskFailedException) = message_of(first(current_exceptions(e.task)).exception)
message_of(e::CompositeException) = message_of(first(e.exceptions))

function message_of(e)
    text = try
        sprint(showerror, e; context = :limit => true)
    catch
        string(typeof(e))
    end
    occursin("Mutating arrays is not supported", text) && (text = MUTATION * text)
    text = length(text) > LONGEST_MESSAGE ? first(text, LONGEST_MESSAGE) * "..." : text
    return rstrip(text)
end

# From the innermost frame out to the border's own: the frames beyond, XLA's and Python's, are not
# Julia's, and looking them up reads the debug information of all of jaxlib.
function user_lines(backtrace)
    lines = String[]
    for address in backtrace, frame in StackTraces.lookup(address)
        frame.from_c && continue
        file = chopprefix(String(frame.file), "./")
        (length(lines) == MOST_LINES || endswith(file, "border/entries.jl")) && return lines
        source = get(SOURCES, Symbol(file), nothing)
        line = if source !== nothing
            "line $(frame.line) of $file: $(strip(get(source, frame.line, "")))"
        elseif is_users(file)
            "$file:$(frame.line), in $(frame.func)"
        else
            continue
        end
        isempty(lines) || last(lines) != line || continue
        push!(lines, line)
    end
    return lines
end

# Not Base's frames, which carry relative names, nor those of a package.
is_users(file::AbstractString) = isabspath(file) &&
    !startswith(file, dirname(Sys.BINDIR)) &&
    !startswith(file, Sys.STDLIB) &&
    !any(folder -> startswith(file, folder), package_folders())

package_folders() = [
    dirname(dirname(path))
    for path in map(pathof, values(Base.loaded_modules))
    if path !== nothing
]

parse_report(error) = let text = message_of(error), where = match(r":(\d+):(\d+)", text)
    where === nothing ? text : "line $(where[1]), column $(where[2]): $text"
end
