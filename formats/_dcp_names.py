"""What are the files of a distributed checkpoint called?"""

from __future__ import annotations

import re

METADATA = ".metadata"
"""Written last; says where everything is."""

OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
"""What one rank saw, where ranks save metadata of their own."""

OTHER_LIBRARY = "metadata.pkl"
"""What another library (torch_checkpointing) calls its metadata, in a folder of such files."""
