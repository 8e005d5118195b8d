"Processor time of this thread in seconds (POSIX clock 3, CLOCK_THREAD_CPUTIME_ID)."
function cputime()
    t = Ref((Clong(0), Clong(0)))
    ccall(:clock_gettime, Cint, (Cint, Ref{Tuple{Clong, Clong}}), 3, t)
    return t[][1] + 1.0e-9 * t[][2]
end
