"""The mechanics of bounded loops: one primitive, a scan whose length is known only at run time.

``primitive``  the loop and its rules: jvp, linearisation, transpose, batching, DCE, lowering
``steps``      what the rules ask of a step's jaxpr: tangents, known and unknown halves, mapping
``saving``     what the forward pass keeps for the reverse pass, and within which memory
``lanes``      loops under vmap whose lanes stop at different times
``tracing``    from the user's functions to the primitive's jaxprs
"""
