# What holds for the package as such. The checks of Aqua, ExplicitImports and JET run where these
# packages are; the others need none.

using NestedGradients: NestedGradients
using ComponentArrays: ComponentArrays
using Lux: Lux
using NNlib: NNlib
using ReverseDiff: ReverseDiff
using Test
using Zygote: Zygote

available(name) = Base.find_package(name) !== nothing

const EXTENSIONS = map(
    name -> Base.get_extension(NestedGradients, name),
    (
        :NestedGradientsZygoteExt,
        :NestedGradientsNNlibExt,
        :NestedGradientsLuxExt,
        :NestedGradientsComponentArraysExt,
        :NestedGradientsReverseDiffExt,
    ),
)

@testset "the extensions are loaded" begin
    @test all(!isnothing, EXTENSIONS)
end

@testset "no ambiguities" begin
    ours(m) = m.module === NestedGradients || m.module in EXTENSIONS
    ambiguities = Test.detect_ambiguities(NestedGradients, EXTENSIONS..., Base)
    # every `frule` of every package meets this fallback; LuxCore has a rule for all parametric types
    theirs(m) = (
        m.module === NestedGradients.ChainRulesCore && m.name in (:frule, :kwcall)
    ) ||
        m.sig <: Tuple{typeof(NestedGradients.ChainRulesCore.rrule), UnionAll, Vararg} ||
        # its tracked arrays never meet ours: a form takes them off first
        nameof(m.module) === :ReverseDiffExt
    found = filter(
        ((a, b),) -> (ours(a) || ours(b)) && !theirs(a) && !theirs(b),
        ambiguities,
    )
    foreach(((a, b),) -> println(a, "\n    ", b), found)
    @test isempty(found)
end

@testset "every exported name has a docstring" begin
    documented = keys(Base.Docs.meta(NestedGradients))
    for name in names(NestedGradients)
        @test Base.Docs.Binding(NestedGradients, name) in documented
    end
end

if available("Aqua")
    using Aqua: Aqua
    @testset "Aqua" begin
        Aqua.test_all(
            NestedGradients;
            ambiguities = false,
            persistent_tasks = false,
            piracies = (; treat_as_own = []),
        )
    end
else
    @info "Aqua is not in the environment"
end

if available("ExplicitImports")
    using ExplicitImports: check_no_implicit_imports, check_no_stale_explicit_imports
    @testset "ExplicitImports" begin
        @test check_no_implicit_imports(NestedGradients) === nothing
        @test check_no_stale_explicit_imports(NestedGradients) === nothing
    end
else
    @info "ExplicitImports is not in the environment"
end

if available("JET")
    using JET: JET
    # `@non_differentiable` of ChainRulesCore makes keyword methods of functions that have none.
    @testset "JET" begin
        result = JET.report_package(
            NestedGradients;
            target_defined_modules = true,
            toplevel_logger = nothing,
        )
        reports = filter(
            r -> !occursin("kwcall", sprint(JET.print_report, r)),
            JET.get_reports(result),
        )
        foreach(r -> println(sprint(JET.print_report, r)), reports)
        @test isempty(reports)
    end
else
    @info "JET is not in the environment"
end
