"""Whose run a folder is, when torchrun restarts its processes.

A job is one torchrun with all its restarts (`Ranks.job`). The run folder knows the job that had it last, in `local.json`, which
is not released; and torchrun's store knows the folder (`Ranks.note_run`). So after a restart

    the folder is the job's, and has no model      the run goes on
    the folder is the job's, and has its model     a process ended after the release: all is done
    the folder is not the job's, which began one   rank 0 is another machine now: it must not begin, and pay, again
    neither                                        nobody came as far as a folder: the run begins
"""

from __future__ import annotations

from pathlib import Path

from dpformer.artifact.layout import LOCAL, MODEL
from dpformer.errors import DPFormerError
from dpformer.files import read_json, write_json
from dpformer.fit.distributed.ranks import Ranks


def began_in(folder: Path, job: str | None) -> bool:
    """Is this the run of a job, and not another job's?"""
    path = folder / LOCAL
    return job is not None and path.is_file() and bool(read_json(path).get("job") == job)


def finished_in(folder: Path, ranks: Ranks) -> bool:
    """Has this job released its model, and been restarted after that?"""
    return ranks.restarts > 0 and began_in(folder, ranks.job) and (folder / MODEL).exists()


def take_over(folder: Path, ranks: Ranks) -> None:
    """A run that this job goes on with is its own from now on."""
    path = folder / LOCAL
    if ranks.job is not None and path.is_file():
        write_json(path, {**read_json(path), "job": ranks.job}, mode=0o600)
    ranks.note_run(folder)


def refuse_second(folder: Path, ranks: Ranks) -> None:
    """After a restart: a job that has begun a run does not begin another where it does not find it."""
    place = ranks.noted_run() if ranks.restarts else None
    if place is not None:
        raise DPFormerError(
            f"{folder}: is not the run that torchrun began before it restarted its processes; that is {place}, where rank 0 was, "
            "and some of its budget is spent. Go on with rank 0 on that machine (torchrun ... -m dpformer resume), or keep run "
            "folders on a disk that all machines share"
        )
