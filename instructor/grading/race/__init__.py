"""`labs race lab3_gluon`: the kernels that a class wrote for Question 5.3, timed on this machine's GPU.

A time is worth something if the kernel could not help to make it. Therefore three processes take part:

| Process | Runs | Sees |
|---|---|---|
| compiler, one a file (`compiling`) | the file's Python, as the Gluon compiler reads it | the file; neither inputs nor times |
| track (`track`) | the compiled kernel, on inputs of its own, between two events | machine code; no Python of a student's |
| judge (`race`) | nothing of a student's | seeds, rows of the outputs, times; computes what the rows should be |

So there is no timer that a submission could replace, no stream that it could choose, no result that it could keep, and no
work that it could do at import: those need Python, and on the track there is none. What is left is what a kernel itself can
do. Machine code that reaches memory other than through the four descriptors of the question is refused before it runs. Each
timed call has fresh inputs, and of each one rows of every tile are compared with float64.
"""
