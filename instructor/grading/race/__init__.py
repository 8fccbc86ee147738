"""`labs race lab3_gluon`: the kernels that a class wrote for Question 5.3, timed on this machine's GPU.

A time is worth something if the kernel could not help to make it. Therefore two processes take part beside the command:

| Process | Runs | Sees |
|---|---|---|
| compiler, one a file (`compiling`) | the file's Python, as the Gluon compiler reads it | the file; neither inputs nor times |
| track (`track`) | the compiled kernel between two events, and the verdict on what it wrote | machine code; no Python of a student's |

So there is no timer that a submission could replace, no stream that it could choose, no result that it could keep, and no
work that it could do at import: those need Python, and on the track there is none. What is left is what a kernel itself can
do. Machine code that reaches memory other than through the four descriptors of the question is refused before it runs. Each
timed call has fresh inputs, and of each one rows of every tile, drawn after it has ended, are compared with float64.
"""
