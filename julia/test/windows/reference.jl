# A vector, a direction, central differences, and which elements each window of the vector sees.

const LONG = [sin(3.7i) for i in 1:60]
const ALONG = [cos(2.1i) for i in 1:60]

central(f, t = 0.0, h = 1.0e-6) = (f(t + h) - f(t - h)) / 2h

# Windows of a vector by positions, as tuples of indices.
function seen(n, window, stride, (low, high), base = 1, dilation = 1)
    spread, span = (n - 1) * base + 1, (window - 1) * dilation + 1
    return map(0:((spread + low + high - span) ÷ stride)) do o
        positions = (o * stride + k * dilation - low for k in 0:(window - 1))
        return [p ÷ base + 1 for p in positions if 0 <= p < spread && p % base == 0]
    end
end
