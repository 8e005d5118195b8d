"""
    NestedGradients

Gradients that hold gradients: nested derivatives for users of DifferentiationInterface, Zygote and
Lux, and the Julia engine of the Python package pybridge.
"""
module NestedGradients

end
