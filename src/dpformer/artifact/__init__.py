"""What is released: the files of a run folder, publishing a model, reading it back, and ranking with it."""

from dpformer.artifact.artifact import Artifact
from dpformer.artifact.read import (
    check_files,
    check_version,
    load,
    read_config,
    read_spec,
    read_statement,
    refuse_unfinished,
)
from dpformer.artifact.write import complete, is_written, publish

__all__ = ["Artifact", "check_files", "check_version", "complete", "is_written", "load", "publish", "read_config"]
__all__ += ["read_spec", "read_statement", "refuse_unfinished"]
