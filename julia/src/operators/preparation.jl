# How DifferentiationInterface calls the operators: with a preparation, with or without the value, in
# place or not. There is nothing to prepare: a preparation holds the signature for DI's strict check, and
# may be used from several threads at once.

# operator, with value, preparation, type of the point, directions or covectors, outputs of the second
const OPERATORS = (
    (:gradient, :value_and_gradient, :Gradient, Any, (), (:grad,)),
    (:derivative, :value_and_derivative, :Derivative, Number, (), (:der,)),
    (
        :second_derivative,
        :value_derivative_and_second_derivative,
        :SecondDerivative,
        Number,
        (),
        (:der, :der2),
    ),
    (:pushforward, :value_and_pushforward, :Pushforward, Any, (:tx,), (:ty,)),
    (:pullback, :value_and_pullback, :Pullback, Any, (:ty,), (:tx,)),
    (:jacobian, :value_and_jacobian, :Jacobian, AbstractArray, (), (:jac,)),
    (:hvp, :gradient_and_hvp, :HVP, Any, (:tx,), (:grad, :tg)),
    (:hessian, :value_gradient_and_hessian, :Hessian, AbstractArray, (), (:grad, :hess)),
)

function checkprep(f, prep, backend, x, rest...)
    return DI.check_prep(f, prep, backend, x, rest...)
end
ChainRulesCore.@non_differentiable checkprep(::Any...)

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

overwrite_after_value!(outs, new) = (first(new), overwrite!(outs, Base.tail(new))...)

interface(name) = Expr(:., :DI, QuoteNode(name))
# an output a direction is a tuple of them
typed(out) = out in (:tx, :ty, :tg) ? :($out::NTuple) : out

for (op, valued, name, X, tangents, outputs) in OPERATORS
    t = [:($s::NTuple) for s in tangents]
    prepare = interface(Symbol(:prepare_, op, :_nokwarg))
    Prep = interface(Symbol(:No, name, :Prep))
    @eval begin
        function $prepare(
            strict::Val,
            f,
            backend::AutoNested,
            x::$X,
            $(t...),
            contexts::Vararg{DI.Context, C},
        ) where {C}
            return $Prep(DI.signature(f, backend, x, $(tangents...), contexts...; strict))
        end
        ChainRulesCore.@non_differentiable $prepare(::Val, ::Any, ::AutoNested, ::Any...)
    end
    for (function_name, outs) in ((op, outputs[end:end]), (valued, outputs))
        inplace = interface(Symbol(function_name, :!))
        out = length(outs) == 1 && function_name === op ? only(outs) : :(($(outs...),))
        write! = function_name === op || op === :hvp ? :overwrite! : :overwrite_after_value!
        @eval begin
            function DI.$function_name(
                f::F,
                prep::$Prep,
                backend::AutoNested,
                x::$X,
                $(t...),
                contexts::Vararg{DI.Context, C},
            ) where {F, C}
                checkprep(f, prep, backend, x, $(tangents...), contexts...)
                return $function_name(f, backend, x, $(tangents...), contexts)
            end
            function $inplace(
                f::F,
                $(typed.(outs)...),
                prep::$Prep,
                backend::AutoNested,
                x::$X,
                $(t...),
                contexts::Vararg{DI.Context, C},
            ) where {F, C}
                return $write!(
                    $out,
                    DI.$function_name(f, prep, backend, x, $(tangents...), contexts...),
                )
            end
        end
    end
    # functions that write into their result
    op in (:derivative, :pushforward, :pullback, :jacobian) &&
        @eval function $prepare(
            strict::Val,
            f!,
            y::AbstractArray,
            backend::AutoNested,
            x::$X,
            $(t...),
            contexts::Vararg{DI.Context, C},
        ) where {C}
            throw(ArgumentError(
                "an AutoNested backend needs a function that returns its result; got one that overwrites it, f!(y, x)",
            ))
        end
end
