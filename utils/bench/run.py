"""Running a plan: case after case, with valid results on the disk after each."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from utils.bench import results as res
from utils.bench.case import CaseRecord, CaseRun
from utils.bench.documents import utc_now, write_json
from utils.bench.errors import BenchError, Refused, VerificationError, WrongRun, first_line
from utils.bench.options import Options
from utils.bench.report import markdown
from utils.bench.targets import Plan
from utils.bench.targets.base import Case
from utils.files import write_whole
from utils.machine.environment import environment, gpu_state


class Interrupted(Exception):
    """Ctrl-C was pressed; `document` has the results so far."""

    def __init__(self, document: dict):
        super().__init__("interrupted")
        self.document = document


class Runner:
    """One run: its results document and its folder."""

    def __init__(
        self,
        plans: Sequence[Plan],
        options: Options,
        device: torch.device,
        on_step: Callable[[Case, str], None] = lambda case, step: None,
    ):
        """Check the options and begin the document; nothing is written or run yet.

        Args:
            plans: what to run.
            options: how to run it.
            device: where to run it.
            on_step: called with the case and one of STEPS before each step, for a progress bar.
        """
        options.check(device.type)
        self.plans, self.options, self.device, self.on_step = plans, options, device, on_step
        self.folder = options.folder
        self.lost_gpu = ""  # why the GPU cannot be used any more
        self.document = res.RESULTS.document(
            run_id=options.run_id,
            status="running",
            started=utc_now(),
            finished=None,
            command=options.command,
            device=str(device),
            profile=options.profile,
            timing=options.timing,
            environment=environment(device),
            gpu_state=gpu_state(device) if device.type == "cuda" else None,
            load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            targets=[{"target": plan.target.name, "sides": list(plan.sides)} for plan in plans],
            cases=[],
        )

    def run(self) -> dict:
        """Run all cases and return the document.

        A kernel fault ends the run; Ctrl-C raises Interrupted. Both leave valid results.
        """
        self.folder.mkdir(parents=True)
        self.save()
        status = "complete"
        try:
            for plan in self.plans:
                for case in plan.cases:
                    self._run_case(plan, case)
                    self.save()
        except KeyboardInterrupt:
            status = "interrupted"
            raise Interrupted(self.document) from None
        except BaseException:
            status = "failed"
            raise
        finally:
            self.document["status"] = "ended by a GPU fault" if self.lost_gpu else status
            self.document["finished"] = utc_now()
            self.save()
        return self.document

    def save(self) -> None:
        """Write the results so far, as JSON and as a page."""
        write_json(self.folder / res.RESULTS_FILE, self.document)
        write_whole(self.folder / res.REPORT_FILE, markdown(self.document))

    def _run_case(self, plan: Plan, case: Case) -> None:
        """Run one case into the document; only Ctrl-C leaves by an exception."""
        record = CaseRecord.of_case(plan, case, self.options)
        self.document["cases"].append(vars(record))
        if self.lost_gpu:
            record.reason = self.lost_gpu
            return
        begin = time.perf_counter()
        try:
            CaseRun(plan, case, record, self.options, self.on_step).measure()
            record.status = res.OK
        except KeyboardInterrupt:
            record.status, record.reason = res.INTERRUPTED, "Ctrl-C; the results so far are kept."
            raise
        except Exception as error:
            record.status, record.reason = _failure(error)
            record.traceback = "" if isinstance(error, BenchError) else "".join(traceback.format_exception(error))
        finally:
            record.seconds = time.perf_counter() - begin
            self._free_gpu(record)

    def _free_gpu(self, record: CaseRecord) -> None:
        """Free the case's memory. After a kernel fault no CUDA context can be used, so the rest is not run."""
        if self.device.type != "cuda" or self.lost_gpu:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as fault:
            self.lost_gpu = f"the GPU context was lost by {record.target} ({record.label}): {first_line(fault)}"
            record.status, record.reason = res.FAILED, record.reason or self.lost_gpu


def _failure(error: Exception) -> tuple[str, str]:
    """Return the status and the reason of a case that ended with this exception."""
    if isinstance(error, Refused):
        return res.REFUSED, str(error)
    if isinstance(error, (VerificationError, WrongRun)):
        return res.FAILED, str(error)
    notes = " ".join(getattr(error, "__notes__", []))
    reason = f"{type(error).__name__}: {first_line(error)}" + (f" ({notes})" if notes else "")
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return res.OUT_OF_MEMORY, f"{reason} Choose smaller sizes."
    return res.FAILED, reason
