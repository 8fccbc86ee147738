"""Where the compiler puts the barriers of a compiled kernel."""

import math
import re
import tempfile


def covered_barriers(ttgir: str) -> list[str]:
    """Return the mbarriers, by their names in Triton's IR, in whose shared memory the compiler puts something else too.

    It gives a barrier's place to what is allocated behind the last line that names it, while a copy may still complete on it.
    PTX forbids that without mbarrier.inval: on an H200 such tiles had nan at the barriers' places.
    """
    from triton._C.libtriton import ir, nvidia, passes

    capability = re.search(r'ttg\.target = "cuda:(\d+)"', ttgir)
    assert capability, "the IR names its target"
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)  # as Triton goes on from here, up to the places
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, int(capability[1]), 80)
    manager.run(module, "places in shared memory")
    barriers, places = {}, []
    for line in re.findall(r".*allocation\.offset = .*", str(module)):
        begin = int(line.split("allocation.offset = ")[1].split(" ")[0])
        buffer = re.search(r"(%\S+) = ttg\.local_alloc .*memdesc<([\dx]+)x[a-z]+(\d+)", line)
        # The IR does not say how much other operations, such as a sum over warps, store on their way: a byte at the least.
        size = math.prod(map(int, buffer[2].split("x"))) * int(buffer[3]) // 8 if buffer else 1
        places.append(range(begin, begin + size))
        if buffer and re.search(r"memdesc<(?:\d+x)?1xi64", line):
            barriers[buffer[1]] = places[-1]
    return [name for name, b in barriers.items() if sum(p.start < b.stop and b.start < p.stop for p in places) > 1]
