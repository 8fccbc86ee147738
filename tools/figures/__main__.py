"""Draws the labs' figures: `python -m tools.figures` writes the SVG files to `assets/`."""

from __future__ import annotations

from pathlib import Path

from tools.figures.attention import decoder_layer, flash_attention, kv_cache
from tools.figures.drawing import Card, drawn_alike
from tools.figures.flex import blocks, layout, mask_program, pages, paths
from tools.figures.gluon import blackwell, ring, specialized, streaming_multiprocessor
from tools.figures.gluon_layouts import barrier_states, blocked_layout, overlap_schedule, swizzle, wgmma_fragment
from tools.figures.hardware import gemm_tiling, gpu_in_ten_minutes, kernel_fusion, memory_hierarchy, roofline_anatomy
from tools.figures.lab1 import decode_step, five_operators, launch_queue, online_softmax, three_roofs
from tools.figures.sdpa import dispatcher, order, rounding, split_kv, strides, traffic, waves
from tools.figures.sdpa_recorded import backend_map, case, contest, roofs
from utils.files import ROOT

FIGURES = {
    "lab4_case": case,
    "lab4_dispatcher": dispatcher,
    "lab4_order": order,
    "lab4_traffic": traffic,
    "lab4_roofs": roofs,
    "lab4_waves": waves,
    "lab4_strides": strides,
    "lab4_map": backend_map,
    "lab4_contest": contest,
    "lab4_rounding": rounding,
    "lab4_split_kv": split_kv,
    "gpu_in_ten_minutes": gpu_in_ten_minutes,
    "gemm_tiling": gemm_tiling,
    "memory_hierarchy": memory_hierarchy,
    "roofline_anatomy": roofline_anatomy,
    "lab1_decode_step": decode_step,
    "lab1_three_roofs": three_roofs,
    "lab1_launch_queue": launch_queue,
    "lab1_five_operators": five_operators,
    "lab1_online_softmax": online_softmax,
    "decoder_layer": decoder_layer,
    "kv_cache": kv_cache,
    "kernel_fusion": kernel_fusion,
    "flash_attention": flash_attention,
    "lab3_sm": streaming_multiprocessor,
    "lab3_ring": ring,
    "lab3_specialized": specialized,
    "lab3_blocked_layout": blocked_layout,
    "lab3_wgmma_fragment": wgmma_fragment,
    "lab3_swizzle": swizzle,
    "lab3_barrier_states": barrier_states,
    "lab3_overlap_schedule": overlap_schedule,
    "lab3_blackwell": blackwell,
    "lab2_mask_program": mask_program,
    "lab2_blocks": blocks,
    "lab2_paths": paths,
    "lab2_pages": pages,
    "lab2_layout": layout,
}


def draw(name: str) -> Card:
    """One figure, drawn."""
    with drawn_alike():
        return FIGURES[name]()


def main(folder: Path = ROOT / "assets") -> list[Path]:
    """Write every figure to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in FIGURES:
        paths.append(folder / f"{name}.svg")
        draw(name).save(paths[-1])
    return paths


if __name__ == "__main__":
    for written in main():
        print(f"{written}  {written.stat().st_size / 1000:.0f} kB")
