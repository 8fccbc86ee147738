"""The track: a process that runs compiled kernels between two events, on inputs of its own, and hands out rows of outputs.

No Python of a student's runs here; a kernel comes as machine code. The process is one of its own because a kernel that
fails takes its CUDA context with it. The judge speaks to it by a channel.

Each timed call is made in this order, all of it queued on one stream: fresh inputs; NaN in the output, so that what is not
written shows; L2 lines that were kept on purpose are released; the L2 is overwritten (cold) or the inputs are read (warm);
a spin, while the rest is queued; an event, the kernel, an event; the rows are copied.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch

from instructor.grading.race.compiling import Kernel, race_launch, signature
from instructor.grading.race.problem import Shape, draw_inputs, rows_to_read
from instructor.grading.sandbox.walls import die_with_parent
from instructor.grading.wire.channel import Channel, Closed, TooLate
from utils.checking.kernel_exercises import Launch, descriptor
from utils.files import ROOT

SPIN_CYCLES = 1_000_000  # about half a millisecond: the launch behind it is queued before it ends
CALL_SECONDS = 6.0  # of one call; a kernel that waits for itself never ends


@dataclass(frozen=True)
class Call:
    """One call of a kernel."""

    kernel: str  # the name under which it was loaded
    shape: Shape  # what it computes
    seed: int  # of its inputs
    lot: int  # of the rows that are read
    cold: bool = True  # overwrite the L2 before it; False reads the inputs instead


@dataclass(frozen=True)
class Seen:
    """What the track saw of a call."""

    ms: float  # between the two events
    ahead: bool  # everything was queued before the device reached it, so no launch is in the time
    inputs_changed: bool  # the kernel wrote into its inputs
    rows: torch.Tensor  # (rows, D) of the output, float64


class TrackError(Exception):
    """The track's process ended, or did not answer in time; the message says which."""


# ---- the judge's side ------------------------------------------------------------------------------------------------


class Track:
    """A track's process, as the judge sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)

    def load(self, name: str, kernel: Kernel) -> None:
        """Give the track a kernel's machine code.

        Raises:
            TrackError: it cannot be loaded.
        """
        facts = asdict(kernel)
        cubin = facts.pop("cubin")
        self._ask({"load": name, **facts}, 120.0, [cubin])

    def forget(self, name: str) -> None:
        """Unload a kernel."""
        self._ask({"forget": name}, 90.0)

    def run(self, call: Call, seconds: float = CALL_SECONDS) -> Seen:
        """Have one call made.

        Raises:
            TrackError: the kernel failed, or did not end in time.
        """
        reply, (rows,) = self._ask({"call": asdict(call)}, seconds)
        return Seen(**reply, rows=torch.frombuffer(rows, dtype=torch.float32).view(-1, call.shape.head_dim).double())

    def _ask(self, message: dict, seconds: float, blobs: list | None = None) -> tuple[dict, list]:
        deadline = time.monotonic() + seconds
        try:
            self.channel.send(message, blobs, deadline)
            reply, data = self.channel.receive(deadline)
        except TooLate:
            raise TrackError(
                f"the kernel did not end within {seconds:.0f} s: does something wait for itself?"
            ) from None
        except Closed:
            raise TrackError("the process that ran the kernel has ended.") from None
        if "error" in reply:
            raise TrackError(reply["error"])
        return reply, data

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.channel.close()


# ---- the process that runs kernels -------------------------------------------------------------------------------------


class Gpu:
    """Runs machine code on this machine's GPU."""

    def __init__(self) -> None:
        from triton.runtime import driver

        from utils.benchmark.cuda_timer import gpu_flush_bytes

        self.driver, self.device = driver, torch.device("cuda", torch.cuda.current_device())
        self.flush = torch.empty(gpu_flush_bytes(self.device) // 4, dtype=torch.int32, device=self.device)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.kernels: dict[str, tuple] = {}
        self.launchers: dict[tuple[str, Shape], tuple] = {}
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()

    def load(self, message: dict, blobs: list) -> None:
        """Load a kernel's machine code."""
        metadata = SimpleNamespace(
            num_warps=message["num_warps"],
            num_ctas=1,
            cluster_dims=(1, 1, 1),
            shared=message["shared"],
            tensordesc_meta=json.loads(message["descriptors"]),
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )
        module, function, *_ = self.driver.active.utils.load_binary(
            message["name"], bytes(blobs[0]), message["shared"], self.device.index
        )
        self.kernels[message["load"]] = (module, function, metadata)
        self.launchers = {key: made for key, made in self.launchers.items() if key[0] != message["load"]}

    def _launcher(self, kernel: str, shape: Shape, metadata: SimpleNamespace):
        """Triton's own launcher of these argument types, made from the question's launch and not from the file."""
        if (kernel, shape) not in self.launchers:
            self.launchers[kernel, shape] = self._make_launcher(race_launch(shape), metadata)
        return self.launchers[kernel, shape]

    def _make_launcher(self, launch: Launch, metadata: SimpleNamespace):
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend

        constants = {"STAGES": launch.args["STAGES"]}
        types = {**signature(launch, list(constants)), **dict.fromkeys(constants, "constexpr")}
        types = {name: types[name] for name in launch.args}
        source = SimpleNamespace(fn=SimpleNamespace(arg_names=list(launch.args)), signature=types, constants=constants)
        packed = make_backend(GPUTarget("cuda", 90, 32)).pack_metadata(metadata)
        return self.driver.active.launcher_cls(source, metadata), packed

    def run(self, call: Call) -> tuple[dict, torch.Tensor]:
        """Make one call; return what was seen, and the rows."""
        shape, (_, function, metadata) = call.shape, self.kernels[call.kernel]
        q, k, v = draw_inputs(shape, call.seed, self.device)
        out = torch.full_like(q, float("nan"))
        heads, rows = (x.to(self.device) for x in rows_to_read(shape, call.seed, call.lot))
        launcher, packed = self._launcher(call.kernel, shape, metadata)
        blocks = [64, shape.block, shape.block, 64]
        tiles = [descriptor(x, [1, 1, b, shape.head_dim]) for x, b in zip((q, k, v, out), blocks, strict=True)]
        arguments = (*tiles, shape.queries, shape.keys, shape.heads, shape.scale, shape.stages)
        stream = torch.cuda.current_stream().cuda_stream
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # An int64 sum of the bits, wrapping around: any change of an input changes it but by a rare accident.
        before = [x.view(torch.int64).sum() for x in (q, k, v)]
        torch.cuda.synchronize()
        self.cuda.cuCtxResetPersistingL2Cache()
        if call.cold:
            self.flush.zero_()
        else:
            before = [x.view(torch.int64).sum() for x in (v, k, q)][::-1]
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        launcher(*shape.grid, stream, function, packed, None, None, None, *arguments)
        end.record()
        ahead = not begin.query()
        written = out[0, heads, rows]
        torch.cuda.synchronize()
        changed = any(int(a) != int(x.view(torch.int64).sum()) for a, x in zip(before, (q, k, v), strict=True))
        seen = {"ms": begin.elapsed_time(end), "ahead": ahead, "inputs_changed": changed}
        return seen, written.float().cpu()


def _serve(machine: Gpu, channel: Channel) -> None:
    """Answer the judge until it closes the channel."""
    while True:
        message, blobs = channel.receive()
        reply: dict = {}
        rows = []
        try:
            if "load" in message:
                machine.load(message, blobs)
            elif "forget" in message:
                machine.kernels.pop(message["forget"], None)
            else:
                fields = message["call"]
                reply, written = machine.run(Call(**{**fields, "shape": Shape(**fields["shape"])}))
                rows = [written.numpy().tobytes()]
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        channel.send(reply, rows)


if __name__ == "__main__":
    die_with_parent()
    with suppress(Closed):
        _serve(Gpu(), Channel(socket.socket(fileno=int(sys.argv[1]))))
