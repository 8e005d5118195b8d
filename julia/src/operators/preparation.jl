# What every operator of DifferentiationInterface has besides its meaning: preparation, and variants in
# place. There is nothing to prepare: a preparation holds the signature, for DI's strict check, and
# may be used from several threads.

const OPERATORS = (
    # operator, with value, preparation, whether it takes directions or covectors
    (:gradient, :value_and_gradient, :GradientPrep, false),
    (:derivative, :value_and_derivative, :DerivativePrep, false),
    (
        :second_derivative,
        :value_derivative_and_second_derivative,
        :SecondDerivativePrep,
        false,
    ),
    (:pushforward, :value_and_pushforward, :PushforwardPrep, true),
    (:pullback, :value_and_pullback, :PullbackPrep, true),
    (:jacobian, :value_and_jacobian, :JacobianPrep, false),
    (:hvp, :gradient_and_hvp, :HVPPrep, true),
    (:hessian, :value_gradient_and_hessian, :HessianPrep, false),
)

checkprep(f, prep, backend, x, rest...) = DI.check_prep(f, prep, backend, x, rest...)
ChainRulesCore.@non_differentiable checkprep(::Any...)

for (op, valued, Prep, tangents) in OPERATORS
    t = tangents ? [:(t::NTuple)] : []
    tnames = tangents ? [:t] : []
    prepare = Symbol(:prepare_, op, :_nokwarg)
    @eval function DI.$prepare(
        strict::Val,
        f,
        backend::AutoNested,
        x,
        $(t...),
        contexts::Vararg{DI.Context, C},
    ) where {C}
        return DI.$(Symbol(:No, Prep))(DI.signature(
            f,
            backend,
            x,
            $(tnames...),
            contexts...;
            strict,
        ))
    end
    for name in (op, valued)
        @eval function DI.$name(
            f::F,
            prep::DI.$Prep,
            backend::AutoNested,
            x,
            $(t...),
            contexts::Vararg{DI.Context, C},
        ) where {F, C}
            checkprep(f, prep, backend, x, $(tnames...), contexts...)
            return DI.$name(f, backend, x, $(tnames...), contexts...)
        end
    end
end

# ---- in place: the result is copied ----

overwrite!(out::AbstractArray, new) = copyto!(out, new)
overwrite!(outs::Tuple, news::Tuple) = map(overwrite!, outs, news)
function ChainRulesCore.rrule(
    ::RuleConfig{>:HasReverseMode},
    ::typeof(overwrite!),
    out,
    new,
)
    throw(ArgumentError(
        "an operator that overwrites its result (gradient!, jacobian!, hvp!, ...) cannot be differentiated in reverse mode; call the variant without `!` in the inner function",
    ))
end

const OUTPUTS = (
    # operator in place, operator, preparation, tangents, outputs, whether the value comes first
    (:gradient!, :gradient, :GradientPrep, false, (:grad,), false),
    (:value_and_gradient!, :value_and_gradient, :GradientPrep, false, (:grad,), true),
    (:derivative!, :derivative, :DerivativePrep, false, (:der,), false),
    (:value_and_derivative!, :value_and_derivative, :DerivativePrep, false, (:der,), true),
    (
        :second_derivative!,
        :second_derivative,
        :SecondDerivativePrep,
        false,
        (:der2,),
        false,
    ),
    (
        :value_derivative_and_second_derivative!,
        :value_derivative_and_second_derivative,
        :SecondDerivativePrep,
        false,
        (:der, :der2),
        true,
    ),
    (:pushforward!, :pushforward, :PushforwardPrep, true, (:ty,), false),
    (:value_and_pushforward!, :value_and_pushforward, :PushforwardPrep, true, (:ty,), true),
    (:pullback!, :pullback, :PullbackPrep, true, (:tx,), false),
    (:value_and_pullback!, :value_and_pullback, :PullbackPrep, true, (:tx,), true),
    (:jacobian!, :jacobian, :JacobianPrep, false, (:jac,), false),
    (:value_and_jacobian!, :value_and_jacobian, :JacobianPrep, false, (:jac,), true),
    (:hvp!, :hvp, :HVPPrep, true, (:tg,), false),
    (:gradient_and_hvp!, :gradient_and_hvp, :HVPPrep, true, (:grad, :tg), false),
    (:hessian!, :hessian, :HessianPrep, false, (:hess,), false),
    (
        :value_gradient_and_hessian!,
        :value_gradient_and_hessian,
        :HessianPrep,
        false,
        (:grad, :hess),
        true,
    ),
)

for (inplace, op, Prep, tangents, outs, valued) in OUTPUTS
    t = tangents ? [:(t::NTuple)] : []
    tnames = tangents ? [:t] : []
    @eval function DI.$inplace(
        f::F,
        $(outs...),
        prep::DI.$Prep,
        backend::AutoNested,
        x,
        $(t...),
        contexts::Vararg{DI.Context, C},
    ) where {F, C}
        new = DI.$op(f, prep, backend, x, $(tnames...), contexts...)
        return $(
            if valued
                :((first(new), overwrite!(($(outs...),), Base.tail(new))...))
            elseif length(outs) > 1
                :(overwrite!(($(outs...),), new))
            else
                :(overwrite!($(outs...), new))
            end
        )
    end
end

# ---- functions that write into their result ----

for (op, _, _, tangents) in OPERATORS
    op in (:derivative, :pushforward, :pullback, :jacobian) || continue
    t = tangents ? [:(t::NTuple)] : []
    @eval function DI.$(Symbol(:prepare_, op, :_nokwarg))(
        strict::Val,
        f!,
        y,
        backend::AutoNested,
        x,
        $(t...),
        contexts::Vararg{DI.Context, C},
    ) where {C}
        throw(ArgumentError(
            "an AutoNested backend needs a function that returns its result; got one that overwrites it, f!(y, x)",
        ))
    end
end
