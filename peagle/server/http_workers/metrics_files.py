"""The files into which a front counts for /metrics; prometheus_client sums those of all fronts.

prometheus_client maps them into memory as sparse files. A write to such a page on a full disk would
kill the front with SIGBUS, and its streams with it: so their space is allocated at the start.
"""

import os
from pathlib import Path

from peagle.errors import UserError

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
KINDS = ("counter", "histogram")  # Of the metrics that fronts write (front/metrics.py).
FILE_BYTES = 1 << 20  # An engine has about 20 KB of histograms.


def allocate_metrics_files() -> None:
    """Create the files of this process before any metric. UserError: there is no space."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    try:
        for kind in KINDS:
            (folder / f"{kind}_{os.getpid()}.db").write_bytes(bytes(FILE_BYTES))
    except OSError as error:
        raise UserError(
            f"the metrics of a web server cannot be written to {folder} ({error.strerror}): free"
            " space there, or set TMPDIR to another folder"
        ) from error
