"""Batch jobs that survive a restart: what a request with a ``job_id`` has generated is kept in a file until it ends.

Sending the same request again, after a crash, a drain or a broken connection, goes on where it stopped: draws depend on
the seed and the position alone, so the text is the one that an undisturbed run would have given.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import asdict, define, frozen

from arbi_core.engine.messages import FinishReason, SubmitMsg
from arbi_core.errors import RequestError
from arbi_core.runner.blob_directory import open_own_directory

if TYPE_CHECKING:
    from arbi_core.scheduler import Request

__all__ = ["JobStore", "SavedJob"]

log = logging.getLogger("arbi.jobs")

SETTING = "scheduler.jobs_dir"
SAVE_EVERY_S = 10.0
KEEP_S = 7 * 24 * 3600.0
"""Files of jobs that nobody asked for again are removed after this time."""

DONE = frozenset({FinishReason.STOP, FinishReason.LENGTH})
"""Ends after which there is nothing to go on with; after any other the job may be sent again."""


@frozen
class SavedJob:
    """Where an interrupted job stands.

    Attributes:
        seed: of its draws.
        output: tokens generated so far.
    """

    seed: int
    output: tuple[int, ...]


@define(eq=False)
class _LiveJob:
    """A job that runs: its file, and how many of its tokens are in it."""

    request: Request
    name: str
    fingerprint: str
    written: int = 0


class JobStore:
    """One file per job, mode 0600, replaced as a whole.

    Args:
        directory: made with mode 0700 if it is missing.
        model: what the tokens mean; jobs of another model are refused.

    Raises:
        ConfigError: the directory cannot be used or others may write in it.
    """

    def __init__(self, directory: str | Path, model: str) -> None:
        self._path = Path(directory)
        self._model = model
        self._fd = open_own_directory(self._path, SETTING)
        self._live: dict[str, _LiveJob] = {}
        self._next_save = 0.0
        self.error: str | None = None
        self._remove_old()

    def load(self, msg: SubmitMsg) -> SavedJob | None:
        """What an earlier run left of a job.

        Raises:
            RequestError: the job runs already, or was begun with another prompt, other parameters or another model.
        """
        if msg.sampling.logprobs is not None:
            raise RequestError("a request with a job_id cannot ask for logprobs", param="logprobs")
        name = _name(msg)
        if any(job.name == name for job in self._live.values()):
            raise RequestError(f"job {msg.job_id!r} is already running", param="job_id", code="job_running", status=409)
        try:
            with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._fd), encoding="utf-8") as file:
                data = json.load(file)
            if data["request"] == self._fingerprint(msg):
                return SavedJob(int(data["seed"]), tuple(int(t) for t in data["output"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.warning("job %r cannot be taken up again and starts anew: %s", msg.job_id, exc)
            return None
        raise RequestError(
            f"job {msg.job_id!r} was begun with another prompt, other parameters or another model; use another job_id",
            param="job_id",
            code="job_conflict",
            status=409,
        )

    def begin(self, request: Request) -> None:
        """Watch a job from now on."""
        self._live[request.id] = _LiveJob(request, _name(request.msg), self._fingerprint(request.msg))

    def tick(self, now: float) -> None:
        """Save what has moved since the last time; does something every few seconds only."""
        if self._live and now >= self._next_save:
            self._next_save = now + SAVE_EVERY_S
            for job in self._live.values():
                self._save(job)

    def end(self, request_id: str, reason: FinishReason) -> None:
        """A request has ended: forget its file, or bring it up to date if the job can be taken up again."""
        job = self._live.pop(request_id, None)
        if job is None:
            return
        if reason in DONE:
            self._remove(job.name)
        else:
            self._save(job)

    def close(self) -> None:
        """Save all. Idempotent."""
        for request_id, job in list(self._live.items()):
            self.end(request_id, job.request.finish_reason or FinishReason.CANCELLED)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _save(self, job: _LiveJob) -> None:
        """A full disk costs the job's progress after a restart, never the job."""
        request, name = job.request, job.name
        if request.num_output == job.written:
            return
        data = {
            "request": job.fingerprint,
            "seed": request.base_seed,
            "output": request.token_ids[request.num_prompt :],
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(name + ".part", flags, 0o600, dir_fd=self._fd), "w", encoding="utf-8") as file:
                json.dump(data, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(name + ".part", name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as exc:
            if self.error is None:
                log.warning("jobs cannot be saved and will not survive a restart (%s): %s", SETTING, exc)
            self.error = str(exc)
            self._remove(name + ".part")
        else:
            self.error = None
            job.written = request.num_output

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        except OSError as exc:
            log.warning("%s cannot be removed: %s", self._path / name, exc)

    def _remove_old(self) -> None:
        oldest = time.time() - KEEP_S
        for path in self._path.glob("job-*"):
            if path.stat(follow_symlinks=False).st_mtime < oldest:
                self._remove(path.name)

    def _fingerprint(self, msg: SubmitMsg) -> str:
        """Everything that decides the text."""
        parts = (
            self._model,
            msg.adapter,
            list(msg.prompt_token_ids),
            sorted(msg.stop_token_ids),
            asdict(msg.sampling),
        )
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _name(msg: SubmitMsg) -> str:
    tenant = msg.tenant.encode()
    return f"job-{hashlib.sha256(b'%d:%s%s' % (len(tenant), tenant, (msg.job_id or '').encode())).hexdigest()}.json"
