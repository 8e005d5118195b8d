"""
The Julia end of the Python package pybridge: XLA's compiled programs call `handler` here directly,
Python is not in the path. It comes with PythonCall, since that is what Python starts Julia with.

| file | holds |
|---|---|
| `frame.jl` | the call frame of XLA's typed FFI, as Julia structs |
| `functions.jl` | the user's functions, by number |
| `plans.jl` | one resolved call: function, shapes, flags, which slot is open |
| `run.jl` | a plan on pointers: load, evaluate the form, store |
| `lending.jl` | whether a function may be lent its arguments unasked |
| `borrowed.jl` | XLA's memory lent to a function for one call |
| `values.jl` | parameters and captures on their way to Python |
| `reports.jl` | what a user reads of a Julia exception |
| `entries.jl` | the pointers that Python and XLA call |
"""
module NestedGradientsPythonCallExt

using ADTypes: AutoZygote
using LinearAlgebra: BLAS
using NestedGradients: NestedGradients, Slot, form
using PythonCall: PythonCall

include("border/frame.jl")
include("border/reports.jl")
include("border/functions.jl")
include("border/lending.jl")
include("border/plans.jl")
include("border/run.jl")
include("border/borrowed.jl")
include("border/values.jl")
include("border/entries.jl")

end
