"""Jobs of test_warm_process.py; the server that runs them is this file as a program."""

import os
import time

import torch

from utils.kernels.warm_process import WarmProcess


def work(job: str):
    """Do what the job's name says; "mark" returns what an earlier job has left, and three facts about the process."""
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
