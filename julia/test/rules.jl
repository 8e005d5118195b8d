# The rules by ChainRulesTestUtils, where it is.

using ADTypes: AutoZygote
using ChainRulesCore: NoTangent
using NestedGradients: NestedGradients, form, rebuild, unwrap
using Test
using Zygote: Zygote

const backend = AutoZygote()
const config = Zygote.ZygoteRuleConfig()

if Base.find_package("ChainRulesTestUtils") === nothing
    @info "ChainRulesTestUtils is not in the environment"
else
    using ChainRulesTestUtils: ⊢, test_frule, test_rrule
    h(x, p) = sum(p .* sin.(x) .* x)
    z = ([0.3, -0.4], [1.5, 0.5])
    u = ([1.0, 0.5], [0.2, -0.3])
    fixed(a) = a ⊢ NoTangent()
    # The types of the slots decide what is returned: no inference of a keyword call to check.
    options = (; check_inferred = false, rtol = 1.0e-7, atol = 1.0e-7)

    @testset "form, slot $open open of $(length(slots))" for (slots, open) in [
            ((1.0, nothing), 1),
            ((1.0, u, nothing), 2),
            ((nothing, u), 0),
            ((nothing, u, u), 0),
        ]
        test_rrule(
            config,
            form,
            fixed(backend),
            fixed(h),
            z,
            slots,
            fixed(Val(open));
            options...,
        )
        test_frule(form, fixed(backend), fixed(h), z, slots, fixed(Val(open)); options...)
    end

    @testset "value and gradient" begin
        test_rrule(
            config,
            NestedGradients.value_and_cotangents,
            fixed(backend),
            fixed(h),
            z,
            fixed(nothing);
            options...,
        )
    end

    @testset "unwrap and rebuild" begin
        nest = (a = [1.0, 2.0], b = (3.0, [0.5 0.1]))
        params(f) = last(unwrap(f))
        test_rrule(config, rebuild, fixed(nest), nest; options...)
        @test agree(
            only(Zygote.gradient(n -> sum(abs2, params(n).a) * params(n).b[1], nest)),
            differences(n -> sum(abs2, n.a) * n.b[1], nest),
        )
    end
end
