# The examples of the docstrings, run by Documenter where it can be loaded.

using NestedGradients: NestedGradients
using Test

if Base.find_package("Documenter") === nothing
    @info "doctests not run: Documenter is not in the environment"
else
    using Documenter: doctest
    doctest(NestedGradients; manual = false)
end
