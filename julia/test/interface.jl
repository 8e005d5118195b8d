# The scenarios of DifferentiationInterfaceTest, as for any other backend: every operator, prepared or not,
# with values, in place, in batches. Functions that write into their result are not for a nested backend.

using ADTypes: AutoZygote
using NestedGradients: AutoNested
using Test
using Zygote: Zygote

if Base.find_package("DifferentiationInterfaceTest") === nothing
    @info "DifferentiationInterfaceTest is not in the environment"
else
    using DifferentiationInterfaceTest: DifferentiationInterfaceTest as DIT
    scenarios = filter(s -> DIT.function_place(s) === :out, DIT.default_scenarios())
    DIT.test_differentiation(
        [AutoNested(AutoZygote())],
        scenarios;
        testset_name = "scenarios",
    )
end
