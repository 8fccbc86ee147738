V = {"s3": (3, {}), "s4": (4, {}), "s4noadd": (4, dict(add=False)), "s3noadd": (3, dict(add=False)), "det": (4, {}, True)}
V3 = {"s3q3": (3, dict(q_slots=3, do_slots=3, ds_slots=2))}
for D, S, c in ((128, 16384, False), (64, 16384, False), (256, 16384, False), (128, 16384, True), (64, 16384, True), (256, 16384, True)):
    if left() < 20: break
    try: point(D, S, c, (V | (V3 if D == 128 else {})) if D < 256 else {"s4": (4, {}), "noadd": (4, dict(add=False)), "det": (4, {}, True)})
    except Exception: traceback.print_exc()
for D in (64, 128, 256):
    try: small_kernels(D)
    except Exception: traceback.print_exc()
for D in (128, 64, 256):
    for c in (False, True):
        if left() < 8: break
        try: point(D, 4096, c, {"s3": (3, {}), "s4": (4, {})} if D < 256 else {"s4": (4, {})})
        except Exception: traceback.print_exc()
