"""The parts behind ``pybridge.reduce_window``.

``geometry``   where the windows lie: everything static about shapes, strides, padding and dilation
``reducer``    what the reducer is: traced once on scalars, checked, recognised
``written``    the written order: a fold over the window's offsets, for any reducer
``doubling``   associative reducers over long windows, at a cost logarithmic in the window
``extremum``   max and min, whose ties, NaN and identity need derivative rules of their own
``total``      sums, which are linear
"""
