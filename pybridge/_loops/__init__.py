"""The mechanics of bounded loops: one primitive, a scan whose length is known only at run time.

``tracing``     from the user's functions to the primitive's jaxprs
``primitive``   the loop: its operands, types and evaluation
``rules``       jvp, linearisation, transpose, batching, DCE
``steps``       what the rules ask of a step's jaxpr: its tangent, its halves, its map over lanes
``saving``      what the forward pass keeps for the reverse pass, and within which memory
``trajectory``  the linear part of a loop whose rows do not fit: a fold that starts from the start
``segments``    such a fold by loops within loops, for reverse mode over reverse mode
``chunks``      the transpose of a loop with large constants, several steps at a time
``lanes``       loops under vmap whose lanes stop at different times
``rows``        steps that write rows of a large buffer, in place
"""

from pybridge._loops import rules as rules  # registers them
