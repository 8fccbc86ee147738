"""Scratch: correctness and timings of variants on the GPU (not committed)."""
import json, os, sys, time, traceback
from dataclasses import replace
import torch
sys.path.insert(0, os.getcwd())
from utils.attention.gluon.backward.launch import backward
from utils.attention.gluon.backward.plan import plan_for
from utils.attention.gluon.launch import forward
from utils.benchmark.measuring import measure_together

OUT = os.environ.get("OUT", "/tmp")
res = {"correct": [], "time": []}
def save(): json.dump(res, open(f"{OUT}/res-{os.environ.get(chr(78)+chr(65)+chr(77)+chr(69), chr(120))}.json", "w"), indent=0)
def rel(a, b): return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
def ref_grads(q, k, v, do, causal, window, scale):
    from utils.attention.reference import reference_gradients
    _, g = reference_gradients(q, k, v, do, causal=causal, window=window, scale=scale)
    return g
try:
    torch.ops.load_library(os.path.expanduser("~/fa3/_C.so")); FA3 = True
except Exception as e:
    print("no fa3", e); FA3 = False
dev = "cuda"
T0 = time.time()
def left(): return LIMIT - (time.time() - T0)
LIMIT = float(os.environ.get("LIMIT", "170"))

def correct(B, H, Hk, Sq, Sk, D, causal=False, window=None, dtype=torch.bfloat16, step=4, scale=None, ch={}, det=False):
    name = f"B{B} H{H}/{Hk} {Sq}x{Sk} D{D} causal={causal} w={window} {str(dtype)[6:]} step{step} {ch} det={det}"
    try:
        torch.manual_seed(1)
        q = torch.randn(B, Sq, H, D, device=dev, dtype=dtype).transpose(1, 2); k = torch.randn(B, Hk, Sk, D, device=dev, dtype=dtype)
        v = torch.randn(B, Hk, Sk, D, device=dev, dtype=dtype); do = torch.randn(B, H, Sq, D, device=dev, dtype=dtype)
        out, lse = forward(q, k, v, causal=causal, window=window, scale=scale, return_lse=True)
        g = backward(do, q, k, v, out, lse, causal=causal, window=window, scale=scale, step=step, plan=replace(plan_for(step, D), **ch), deterministic=det)
        torch.cuda.synchronize()
        r = ref_grads(q, k, v, do, causal, window, scale)
        e = [rel(a, b) for a, b in zip(g, r)]
        row = {"case": name, "err": e}
        if FA3 and H % Hk == 0 and window is None:
            try:
                t = lambda x: x.transpose(1, 2).contiguous()
                o3 = torch.ops.flash_attn_3.fwd(t(q), t(k), t(v), softmax_scale=scale, is_causal=causal)
                g3 = torch.ops.flash_attn_3.bwd(t(do), t(q), t(k), t(v), o3[0], o3[1], softmax_scale=scale, is_causal=causal)
                row["fa3"] = [rel(a.transpose(1, 2), b) for a, b in zip(g3[:3], r)]
            except Exception as ex: row["fa3_error"] = str(ex)[:200]
        bad = not max(e) < 0.01
        print("BAD" if bad else "ok ", name, ["%.5f" % x for x in e], [("%.5f" % x) for x in row.get("fa3", [])], flush=True)
        res["correct"].append(row); save()
        return not bad
    except Exception as ex:
        print("FAIL", name, repr(ex)[:600], flush=True); res["correct"].append({"case": name, "error": repr(ex)[:2000]}); save()
        return False

HEADS = {64: 32, 128: 16, 256: 8}
def point(D, S, causal, variants, iters=8, peers=("cudnn", "fa3")):
    B, H = 16384 // S, HEADS[D]
    torch.manual_seed(0)
    mk = lambda: torch.randn(B, H, S, D, device=dev, dtype=torch.bfloat16)
    q, k, v, do = mk(), mk(), mk(), mk()
    flops = 2.5 * 4 * B * H * S * S * D * (0.5 if causal else 1)
    out, lse = forward(q, k, v, causal=causal, return_lse=True)
    fns, labels = [], []
    if "cudnn" in peers:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        qc, kc, vc = (x.detach().clone().requires_grad_() for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            oc = torch.nn.functional.scaled_dot_product_attention(qc, kc, vc, is_causal=causal)
        fns.append(lambda: torch.autograd.grad(oc, (qc, kc, vc), do, retain_graph=True)); labels.append("cudnn")
    if "fa3" in peers and FA3:
        t = lambda x: x.transpose(1, 2).contiguous()
        q3, k3, v3, d3 = t(q), t(k), t(v), t(do)
        o3 = torch.ops.flash_attn_3.fwd(q3, k3, v3, is_causal=causal)
        fns.append(lambda: torch.ops.flash_attn_3.bwd(d3, q3, k3, v3, o3[0], o3[1], is_causal=causal)); labels.append("fa3")
    if "fa4" in peers:
        from flash_attn.cute.interface import _flash_attn_fwd, _flash_attn_bwd
        t = lambda x: x.transpose(1, 2).contiguous()
        q4, k4, v4, d4 = t(q), t(k), t(v), t(do)
        o4, l4 = _flash_attn_fwd(q4, k4, v4, causal=causal, return_lse=True)[:2]
        fns.append(lambda: _flash_attn_bwd(q4, k4, v4, o4, d4, l4, causal=causal)); labels.append("fa4")
    for name, (step, ch, *det) in variants.items():
        try:
            plan = replace(plan_for(step, D), **ch)
            f = lambda step=step, plan=plan, det=bool(det): backward(do, q, k, v, out, lse, causal=causal, step=step, plan=plan, deterministic=det)
            f(); torch.cuda.synchronize()
            fns.append(f); labels.append(name)
        except Exception as ex:
            print("FAIL", D, S, causal, name, repr(ex)[:500], flush=True)
            res["time"].append({"D": D, "S": S, "causal": causal, "name": name, "error": repr(ex)[:2000]})
    ms = measure_together(fns, labels=labels, warmup=2, iterations=iters, device="cuda", l2="cold")
    line = {l: flops / m.median_ms / 1e9 for l, m in zip(labels, ms)}
    res["time"].append({"D": D, "S": S, "causal": causal, "tflops": line, "ms": {l: m.median_ms for l, m in zip(labels, ms)}}); save()
    print(f"D{D} S{S} {'causal' if causal else 'full':6}", "  ".join(f"{l} {x:.0f}" for l, x in line.items()), flush=True)

def small_kernels(D, S=16384):
    """Times of start_backward and finish_dq alone, by the profiler."""
    B, H = 16384 // S, HEADS[D]
    q, k, v, do = (torch.randn(B, H, S, D, device=dev, dtype=torch.bfloat16) for _ in range(4))
    out, lse = forward(q, k, v, causal=True, return_lse=True)
    from torch.profiler import profile, ProfilerActivity
    backward(do, q, k, v, out, lse, causal=True, step=4); backward(do, q, k, v, out, lse, causal=True, step=4, deterministic=True); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3):
            backward(do, q, k, v, out, lse, causal=True, step=4); backward(do, q, k, v, out, lse, causal=True, step=4, deterministic=True)
        torch.cuda.synchronize()
    for e in p.key_averages():
        if e.self_device_time_total: print("   ", D, e.key[:60], round(e.self_device_time_total / e.count, 1), "us", flush=True)
exec(open(os.environ.get("JOB", "dev_job.py")).read())
