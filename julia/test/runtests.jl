# All tests of the package; run as
#
#     julia --project=ENV julia/test/runtests.jl [name ...]
#
# where ENV is an environment that holds the package, its weak dependencies and, for the formalities,
# Aqua, JET and ExplicitImports. With names, only the files that contain one of them.

using Test

const FILES = [
    "formalities.jl",
    "skeletons.jl",
    "levels.jl",
    "dualarrays.jl",
    "closures.jl",
    "form.jl",
    "operators/gradient.jl",
    "operators/derivative.jl",
    "operators/pushforward.jl",
    "operators/pullback.jl",
    "operators/jacobian.jl",
    "operators/hvp.jl",
    "layers.jl",
    "reports.jl",
    "sow.jl",
    "harvested.jl",
    "windows.jl",
    "pooling.jl",
    "loops.jl",
    "doctests.jl",
]

include("differences.jl")

# Every file in a module of its own: what one defines is not there for the next. The modules are kept:
# Julia 1.10 would collect one under the methods that were defined in it.
const SPACES = Module[]
function run(file)
    tests = Module(Symbol(replace(file, r"\W" => "_")))
    push!(SPACES, tests)
    Core.eval(tests, :(using Main: agree, differences, flatten, refill))
    return Base.include(tests, joinpath(@__DIR__, file))
end

@testset "NestedGradients" verbose = true begin
    for file in FILES
        isempty(ARGS) || any(name -> occursin(name, file), ARGS) || continue
        @testset "$file" run(file)
    end
end
