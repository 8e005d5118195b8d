# All tests of the package; run as
#
#     julia --project=ENV --threads=2 julia/test/runtests.jl [name ...]
#
# where ENV is an environment that holds the package, its weak dependencies and, for the formalities and
# two files more, Aqua, JET, ExplicitImports, ChainRulesTestUtils and DifferentiationInterfaceTest.
#
# With names: the files that contain one of them, in this process. Without: COMPILED in this process, and
# beside it INTERPRETED in one started with --compile=min. Nearly all of the suite's time is the
# compilation of code that runs once, which an interpreter does not need.

using Test

const COMPILED = [
    "formalities.jl",
    "skeletons.jl",
    "levels.jl",
    "dualarrays.jl", # its loops are written for the compiler
    "operators/hvp.jl",
    "sow.jl",
    "windows/long.jl",
    "loops.jl", # Zygote meets other code of keyword calls in the interpreter
    "doctests.jl",
]
const INTERPRETED = [
    "closures.jl",
    "captures.jl",
    "form.jl",
    "rules.jl",
    "operators/gradient.jl",
    "operators/derivative.jl",
    "operators/pushforward.jl",
    "operators/pullback.jl",
    "operators/jacobian.jl",
    "interface.jl",
    "reversediff.jl",
    "matrices.jl",
    "layers.jl",
    "reports.jl",
    "harvested.jl",
    "windows.jl",
    "windows/operands.jl",
    "pooling.jl",
]

include("differences.jl")
include("products.jl")

# Every file in a module of its own: what one defines is not there for the next. The modules are kept:
# Julia 1.10 would collect one under the methods that were defined in it.
const SPACES = Module[]
function run_file(file)
    tests = Module(Symbol(replace(file, r"\W" => "_")))
    push!(SPACES, tests)
    Core.eval(tests, :(using Main: agree, checkproducts, differences, flatten, refill))
    seconds = @elapsed Base.include(tests, joinpath(@__DIR__, file))
    println(file, ": ", round(Int, seconds), " s")
    flush(stdout)
end

function start(files)
    command = `$(Base.julia_cmd()) --compile=min --project=$(Base.active_project()) --threads=$(Threads.nthreads()) $(@__FILE__) $files`
    return run(pipeline(ignorestatus(command); stdout, stderr); wait = false)
end

@testset "NestedGradients" verbose = true begin
    if isempty(ARGS)
        interpreted = start(INTERPRETED)
        @testset "$file" for file in COMPILED
            run_file(file)
        end
        wait(interpreted)
        @testset "interpreted (its own table is above)" begin
            @test success(interpreted)
        end
    else
        named(file) = any(name -> occursin(name, file), ARGS)
        @testset "$file" for file in filter(named, [COMPILED; INTERPRETED])
            run_file(file)
        end
    end
end
