# Windowed reductions with derivatives in every case, the twin of Python's `pybridge.reduce_window`.

# Positions in a window up to which it is folded in the written order in any case.
const UNROLLED = 32

include("windows/geometry.jl")
include("windows/reducers.jl")
include("windows/written.jl")
include("windows/doubling.jl")
include("windows/reduce_window.jl")
include("windows/rules.jl")
