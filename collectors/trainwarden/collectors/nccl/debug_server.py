"""Dumps that torch's debug server gives, one rank's worker at a time (torch/csrc/distributed/c10d/control_plane).

A worker is a thread of the rank, in C++: it answers also while the training hangs. What it says is the tenant's word
like any dump: it is put into a file of the job's user, and read from there in a child without rights.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from trainwarden.collectors.nccl.places import Places
from trainwarden.core.errors import DeliveryError
from trainwarden.core.net import get

HANDLERS: Final = ("dump_nccl_trace_json?includestacktraces=false", "fr_trace_json?includestacktraces=false")
"""Of NCCL's recorder, where torch has one; of the one for the CPU's process groups. Frames of stacks are not read."""

DEADLINE_S: Final = 5.0
"""For one answer, on the loopback: 2,000 entries are 1 MB."""


class Fetched:
    """A folder of ours for dumps of one job: made when the first one comes, removed by close()."""

    def __init__(self, owner_uid: int) -> None:
        """owner_uid: the job's user, to whom they are to belong."""
        self._owner_uid = owner_uid
        self._folder: Path | None = None
        self._closed = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Where dumps lie, a rank's number behind it; any thread may ask."""
        return () if self._folder is None else (f"{self._folder}/rank_",)

    def fetch(self, rank: int, places: Places, port: int, max_bytes: int) -> tuple[str, str] | None:
        """Ask the worker of a rank; (URL, why) where there is no answer. port: of the rank with local rank 0."""
        if places.local_rank is None:
            return "", "which port is its own is not known: LOCAL_RANK is not set"
        base = f"http://127.0.0.1:{port + places.local_rank}"
        for number, handler in enumerate(HANDLERS):
            try:
                dump = get(f"{base}/handler/{handler}", {}, DEADLINE_S, max_bytes, method="POST").body
            except DeliveryError as error:
                if error.retryable or number == len(HANDLERS) - 1:
                    return base, f"its debug server gives no dump: {error}"
                continue
            return self._keep(rank, dump)
        return None

    def close(self) -> None:
        """Remove it; nothing is kept any more."""
        self._closed = True
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _keep(self, rank: int, dump: bytes) -> tuple[str, str] | None:
        if self._closed:
            return "", "the job is over"
        try:
            if self._folder is None:
                folder = Path(tempfile.mkdtemp(prefix="trainwarden-dumps-"))
                folder.chmod(0o711)  # the child that reads is the job's user
                self._folder = folder
            new = self._folder / f"new_{rank}"
            new.write_bytes(dump)
            os.chmod(new, 0o400)
            if os.geteuid() == 0:
                os.chown(new, self._owner_uid, -1)
            new.replace(self._folder / f"rank_{rank}")
        except OSError as error:
            why = f"what its debug server gave cannot be kept: {error.strerror}"
            return str(self._folder or tempfile.gettempdir()), why
        return None
