"""What stands behind pybridge.harvest, one idea a file.

primitive: the named identity. forms: a jaxpr as a function of perturbations and to named values.
levels: the differentiating and mapping transformations of such a function. entries: what a user reads.
"""
