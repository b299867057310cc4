"""On what file system a path lies, as /proc/self/mountinfo says (proc_pid_mountinfo(5))."""

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "cifs",
        "smb2",
        "smb3",
        "smbfs",
        "ncpfs",
        "9p",
        "afs",
        "coda",
        "ceph",
        "glusterfs",
        "gpfs",
    }
    | {"beegfs", "beegfs_nodev", "wekafs", "panfs", "pvfs2", "orangefs", "ocfs2", "gfs", "gfs2", "daos", "vastnfs"}
)
"""Types of file systems that several hosts share."""

_NETWORK_FUSE = re.compile(
    r"fuse\.(sshfs|ceph|glusterfs|s3fs|gcsfuse|mount-s3|rclone|goofys|juicefs|lustre|dfuse|cvmfs2?|afpfs|davfs2?)"
    r"|fuse\.(beegfs|seaweedfs|moosefs|mfs|quobyte|alluxio\S*|blobfuse2?|hdfs\S*|nfs\S*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of mountinfo."""

    point: str
    kind: str
    """Type of file system."""
    source: str

    @property
    def is_network(self) -> bool:
        return self.kind in NETWORK or _NETWORK_FUSE.fullmatch(self.kind) is not None


def mount_of(path: Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """The mount that a path (or what exists of it) lies on; None: it cannot be told."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = path.resolve()
    found = [mount for line in lines if (mount := _parsed(line)) is not None and real.is_relative_to(mount.point)]
    # of mounts on one point the last one hides the others
    return max(enumerate(found), key=lambda one: (len(Path(one[1].point).parts), one[0]), default=(0, None))[1]


def _parsed(line: str) -> Mount | None:
    before, dash, after = line.partition(" - ")
    place, system = before.split(" "), after.split(" ")
    if not dash or len(place) < 5 or len(system) < 2:
        return None
    return Mount(point=_unescaped(place[4]), kind=system[0], source=_unescaped(system[1]))


def _unescaped(text: str) -> str:
    """Blanks and backslashes are written in octal.

    >>> _unescaped("/my\\\\040disk")
    '/my disk'
    """
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
