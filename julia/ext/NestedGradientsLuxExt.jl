# Lux's layers on our arrays.
module NestedGradientsLuxExt end
