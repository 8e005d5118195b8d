"""What stands behind pybridge.harvest, one idea a file.

primitive  the named identity, and the session that asks for names
forms      a jaxpr as a function of perturbations and to named values, one class an equation
equation   how a level stands in a program
levels     what grad, jvp, vmap and their kin make of such a function
wrappers   JAX's transformations with JAX's signatures, which leave a level in the program
calls      jit and scan, whose ignored named values become outputs
program    a function traced under a session, in two passes
layout     which parts of it make which named value; a name used twice
entries    what the user reads
planting, linear            plant and linearize
bounded, julia              named values in bounded loops and in Julia code
lanes                       branches and loops that differ between the lanes of jax.vmap
"""
