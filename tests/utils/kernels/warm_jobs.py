"""Jobs of test_warm_process.py; run as a program, this file is the server."""

import os
import time

import torch

from utils.kernels.warm_process import WarmProcess


def work(job: str):
    """Do what the job's name says; "mark" returns the mark that an earlier job may have left, and three facts about the process."""
    if job == "exit":
        os._exit(3)
    if job == "raise":
        raise ValueError("a wrong job")
    if job == "sleep":
        time.sleep(300)
    if job == "segfault":
        os.kill(os.getpid(), 11)
    print("printed", job)
    seen, torch.mark = getattr(torch, "mark", 0), 1
    return [seen, os.getpid(), os.getppid(), int(os.environ.get("A_WORD", 0))]


PROCESS = WarmProcess("tests.utils.kernels.warm_jobs", lambda: None, work)

if __name__ == "__main__":
    PROCESS.serve()
