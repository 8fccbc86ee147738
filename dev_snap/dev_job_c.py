D = int(os.environ["D"])
V = [(3, {}), (4, {}), (4, dict(add=False)), (3, dict(add=False))] if D < 256 else [(4, {}), (4, dict(add=False))]
if D == 128: V.append((3, dict(q_slots=3, do_slots=3, ds_slots=2)))
for step in ((3, 4) if D < 256 else (4,)):
    correct(1, 2, 2, 512, 512, D, step=step)
    correct(2, 4, 2, 1000, 1300, D, causal=True, step=step)
for step, ch in V:  # compile what is timed later
    for c in (False, True):
        correct(1, 2, 2, 1024, 1024, D, causal=c, step=step, ch=ch)
for c in (False, True):
    correct(1, 2, 2, 1024, 1024, D, causal=c, det=True)
correct(1, 4, 1, 700, 300, D, causal=True, window=100)
correct(1, 2, 2, 300, 777, D, window=200, dtype=torch.float16)
correct(1, 3, 3, 2048, 2048, D - 16, dtype=torch.float16, causal=True)
correct(1, 2, 2, 129, 4097, D)
